"""What the documents show of each suite: the renderers of their blocks and their figures."""
