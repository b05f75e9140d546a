// The rows of a JSONL file and their order, as Python sees them; contracts in src/strop/data/streams.py and training/run.py.
#pragma once

#include <nanobind/nanobind.h>

namespace strop {

void define_rows(nanobind::module_& m);

}  // namespace strop
