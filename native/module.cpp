// The compiled module strop._native.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "dispatch.h"
#include "moe_boundary.h"
#include "primitives_boundary.h"
#include "rows.h"
#include "threads.h"

namespace nb = nanobind;

NB_MODULE(_native, m) {
    m.doc() = "Compiled parts of strop; use them through the public names of the package.";
    nb::set_leak_warnings(false);  // objects held by a daemon thread when the process ends are no leaks
    m.def("isa", [] { return std::string(strop::kernels().isa); }, "The instruction set in use.");
    m.def("available_isas", &strop::available_isas, "What this CPU can run, widest first.");
    m.def("set_isa", &strop::set_isa, nb::arg("name"), "Switch to one of available_isas(); False for another name.");
    m.def("num_threads", &strop::num_threads);
    m.def("set_num_threads", &strop::set_num_threads, nb::arg("count"));
    strop::define_primitives(m);
    strop::define_moe(m);
    strop::define_rows(m);
}
