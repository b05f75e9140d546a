#pragma once

#include <nanobind/nanobind.h>

namespace strop {

void define_moe(nanobind::module_& m);

}  // namespace strop
