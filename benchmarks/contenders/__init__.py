"""Ways to do the work of a suite: strop, and the libraries it is compared with."""
