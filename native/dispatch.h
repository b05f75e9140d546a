// Run-time choice of instruction set.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace strop {

// The kernels in use. Initially those of the widest instruction set of this CPU.
const Kernels& kernels();

// Returns the compiled instruction sets that this CPU can run, the widest first.
std::vector<std::string> available_isas();

// Switches to one of available_isas(). Returns false for any other name.
bool set_isa(const std::string& name);

}  // namespace strop
