// Run-time choice of instruction set.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace strop {

// The kernels in use: at first the widest this CPU has.
const Kernels& kernels();

// What was compiled in and this CPU can run, widest first.
std::vector<std::string> available_isas();

// Switches to one of available_isas(); false for any other name.
bool set_isa(const std::string& name);

}  // namespace strop
