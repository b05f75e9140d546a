// The primitives as Python sees them.
#pragma once

#include <nanobind/nanobind.h>

namespace strop {

void define_primitives(nanobind::module_& m);

}  // namespace strop
