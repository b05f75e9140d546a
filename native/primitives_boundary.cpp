// The boundary between Python and the primitives.
//
// Advantages and KL take microseconds, so their entry points use CPython's vectorcall and NumPy's C API directly. They handle
// only the plain case: contiguous NumPy arrays of one float type and matching shapes. Every other call (a list, a tensor, a
// strided view, a mistake) goes unchanged to the function's Python twin. The twin explains what is wrong, or converts the input
// to the plain form and calls the entry point that has no twin. So every message and every conversion is written once, in
// Python.
#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION NPY_2_0_API_VERSION
#include "primitives_boundary.h"

#include <nanobind/stl/string.h>
#include <numpy/arrayobject.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <new>
#include <string>
#include <type_traits>

#include "primitives.h"

namespace nb = nanobind;

namespace strop {
namespace {

// From this many elements on, the work takes longer than releasing and taking the interpreter lock.
constexpr npy_intp kReleaseElements = npy_intp{1} << 14;

// Runs body(), without the interpreter lock if that pays; returns false with MemoryError set if memory ran out. No destructor
// may run while the lock is taken back: when the process ends, Python terminates this thread at that point.
template <class Body>
bool compute(bool without_lock, Body&& body) {
    bool enough_memory = true;
    PyThreadState* state = without_lock ? PyEval_SaveThread() : nullptr;
    try {
        body();
    } catch (const std::bad_alloc&) {
        enough_memory = false;
    }
    if (state) PyEval_RestoreThread(state);
    if (!enough_memory) PyErr_NoMemory();
    return enough_memory;
}

// `self` is a module whose attribute `twin` is the Python twin (a builtin of a module pickles by its name), or None.
struct Call {
    PyObject* self;
    PyObject* const* args;
    Py_ssize_t count;
    PyObject* keywords;

    PyObject* hand_to_twin() const {
        if (!has_twin()) {
            PyErr_SetString(PyExc_RuntimeError, "strop's compiled primitives were called with arrays the Python side should have prepared");
            return nullptr;
        }
        nb::object twin = nb::steal(PyObject_GetAttrString(self, "twin"));
        return twin.is_valid() ? PyObject_Vectorcall(twin.ptr(), args, static_cast<size_t>(count), keywords) : nullptr;
    }

    bool has_twin() const { return self != Py_None; }

    // Fills in the arguments in the order of `names`, with null for absent ones; returns false if the call has another form.
    template <size_t N>
    bool bind(PyObject* const (&names)[N], Py_ssize_t max_positional, PyObject* (&slots)[N]) const {
        if (count > max_positional) return false;
        for (size_t i = 0; i < N; ++i) slots[i] = static_cast<Py_ssize_t>(i) < count ? args[i] : nullptr;
        const Py_ssize_t given = keywords ? PyTuple_GET_SIZE(keywords) : 0;
        for (Py_ssize_t k = 0; k < given; ++k) {
            size_t i = 0;
            while (i < N && names[i] != PyTuple_GET_ITEM(keywords, k)) ++i;  // keywords are interned
            if (i == N || slots[i]) return false;
            slots[i] = args[count + k];
        }
        return true;
    }
};

bool absent(PyObject* o) { return !o || o == Py_None; }

PyArrayObject* plain_array(PyObject* o) {
    if (!o || !PyArray_CheckExact(o)) return nullptr;
    auto* array = reinterpret_cast<PyArrayObject*>(o);
    return PyArray_ISCARRAY_RO(array) ? array : nullptr;
}

PyArrayObject* plain_floats(PyObject* o, bool only_f32 = false) {
    PyArrayObject* array = plain_array(o);
    if (!array) return nullptr;
    const int type = PyArray_TYPE(array);
    return type == NPY_FLOAT || (type == NPY_DOUBLE && !only_f32) ? array : nullptr;
}

// Returns the object as a contiguous array of int64 with this many dimensions, or null.
PyArrayObject* plain_int64(PyObject* o, int dimensions) {
    PyArrayObject* array = plain_array(o);
    if (!array || !PyArray_ISSIGNED(array) || PyArray_ITEMSIZE(array) != sizeof(int64_t)) return nullptr;
    return PyArray_NDIM(array) == dimensions ? array : nullptr;
}

bool same_shape(PyArrayObject* a, PyArrayObject* b) {
    if (PyArray_NDIM(a) != PyArray_NDIM(b)) return false;
    return PyArray_CompareLists(PyArray_DIMS(a), PyArray_DIMS(b), PyArray_NDIM(a));
}

template <class T>
const T* data_of(PyArrayObject* a) {
    return static_cast<const T*>(PyArray_DATA(a));
}

// Reads a whole number in [low, high]; returns false for anything else.
bool whole_number(PyObject* o, npy_intp low, npy_intp high, npy_intp* value) {
    if (!PyLong_CheckExact(o)) return false;
    int overflow = 0;
    const long long found = PyLong_AsLongLongAndOverflow(o, &overflow);
    *value = static_cast<npy_intp>(found);
    return !overflow && found >= low && found <= high;
}

// ---- KL -------------------------------------------------------------------------------------------------------------

PyObject* name_log_p;
PyObject* name_log_q;
PyObject* name_seq_len;
PyObject* name_mask;

struct KlInput {
    PyArrayObject *log_p, *log_q;
    const uint8_t* mask;

    bool read(PyObject* p, PyObject* q, PyObject* m, bool only_f32) {
        log_p = plain_floats(p, only_f32);
        log_q = plain_floats(q, only_f32);
        if (!log_p || !log_q || PyArray_TYPE(log_p) != PyArray_TYPE(log_q) || !same_shape(log_p, log_q)) return false;
        mask = nullptr;
        if (absent(m)) return true;
        PyArrayObject* array = plain_array(m);
        if (!array || PyArray_TYPE(array) != NPY_BOOL || !same_shape(array, log_p)) return false;
        mask = data_of<uint8_t>(array);
        return true;
    }

    bool is_f32() const { return PyArray_TYPE(log_p) == NPY_FLOAT; }
    npy_intp size() const { return PyArray_SIZE(log_p); }

    template <class T, class Out>
    bool rows(KlEstimator estimator, npy_intp count, npy_intp length, Out* out) const {
        return compute(size() >= kReleaseElements, [&] {
            kl_rows(estimator, data_of<T>(log_p), data_of<T>(log_q), mask, static_cast<size_t>(count), static_cast<size_t>(length), out);
        });
    }
};

// compute_token_kl…(log_p, log_q, mask=None) -> float
template <KlEstimator estimator, bool only_f32>
PyObject* kl_total(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* keywords) {
    const Call call{self, args, count, keywords};
    PyObject* slots[3];
    KlInput in;
    PyObject* const names[] = {name_log_p, name_log_q, name_mask};
    if (!call.bind(names, 3, slots) || !in.read(slots[0], slots[1], slots[2], only_f32)) return call.hand_to_twin();
    double total = 0.0;
    const bool done = in.is_f32() ? in.rows<float>(estimator, 1, in.size(), &total) : in.rows<double>(estimator, 1, in.size(), &total);
    return done ? PyFloat_FromDouble(total) : nullptr;
}

// compute_batch_token_kl…(log_p, log_q, seq_len=None, mask=None) -> (B,)
template <KlEstimator estimator, bool only_f32>
PyObject* kl_batch(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* keywords) {
    const Call call{self, args, count, keywords};
    PyObject* slots[4];
    KlInput in;
    PyObject* const names[] = {name_log_p, name_log_q, name_seq_len, name_mask};
    if (!call.bind(names, 4, slots) || !in.read(slots[0], slots[1], slots[3], only_f32)) return call.hand_to_twin();

    npy_intp rows, length;
    if (PyArray_NDIM(in.log_p) == 2 && absent(slots[2])) {
        rows = PyArray_DIM(in.log_p, 0);
        length = PyArray_DIM(in.log_p, 1);
    } else if (PyArray_NDIM(in.log_p) == 1 && !absent(slots[2]) && whole_number(slots[2], 1, NPY_MAX_INTP, &length) &&
               in.size() % length == 0) {
        rows = in.size() / length;
    } else {
        return call.hand_to_twin();
    }
    PyObject* out = PyArray_SimpleNew(1, &rows, PyArray_TYPE(in.log_p));
    if (!out) return nullptr;
    void* data = PyArray_DATA(reinterpret_cast<PyArrayObject*>(out));
    const bool done = in.is_f32() ? in.rows<float>(estimator, rows, length, static_cast<float*>(data))
                                  : in.rows<double>(estimator, rows, length, static_cast<double*>(data));
    if (done) return out;
    Py_DECREF(out);
    return nullptr;
}

// ---- advantages -----------------------------------------------------------------------------------------------------

PyObject* name_rewards;
PyObject* name_group_size;
PyObject* name_ddof;
PyObject* name_eps;
PyObject* name_scale;
PyObject* name_lengths;
PyObject* name_k;
constexpr const char* kScaleWords[] = {"group", "batch", "none", "leave_one_out", "mean"};  // as in AdvantageScale
PyObject* scale_words[std::size(kScaleWords)];

bool read_ddof(PyObject* o, npy_intp* ddof) {
    *ddof = 0;
    return !o || whole_number(o, 0, NPY_MAX_INTP, ddof);
}

bool read_eps(PyObject* o, double* eps) {
    *eps = 0.0;
    if (!o) return true;
    if (!PyFloat_CheckExact(o)) return false;
    *eps = PyFloat_AS_DOUBLE(o);
    return std::isfinite(*eps) && *eps >= 0.0;
}

bool read_scale(PyObject* o, AdvantageScale* scale) {
    *scale = AdvantageScale::group;
    if (!o) return true;
    for (size_t i = 0; i < std::size(scale_words); ++i)
        if (o == scale_words[i]) {
            *scale = static_cast<AdvantageScale>(i);
            return true;
        }
    return false;
}

// Returns a new array like `rewards`, filled by fill(rewards, out); calls the twin if fill returns false.
template <class Fill>
PyObject* like_rewards(const Call& call, PyArrayObject* rewards, Fill&& fill) {
    PyObject* out = PyArray_SimpleNew(PyArray_NDIM(rewards), PyArray_DIMS(rewards), PyArray_TYPE(rewards));
    if (!out) return nullptr;
    void* data = PyArray_DATA(reinterpret_cast<PyArrayObject*>(out));
    bool finished = false;
    const bool done = compute(PyArray_SIZE(rewards) >= kReleaseElements, [&] {
        finished = PyArray_TYPE(rewards) == NPY_FLOAT ? fill(data_of<float>(rewards), static_cast<float*>(data))
                                                      : fill(data_of<double>(rewards), static_cast<double*>(data));
    });
    if (done && finished) return out;
    Py_DECREF(out);
    if (!done) return nullptr;
    return call.has_twin() ? call.hand_to_twin() : Py_NewRef(Py_None);
}

struct AdvantageCall {
    PyArrayObject* rewards;
    npy_intp groups, group_size, ddof;
    double eps;
    AdvantageScale scale;
};

PyObject* advantages(const Call& call, const AdvantageCall& in) {
    const npy_intp divided_by = in.scale == AdvantageScale::group ? in.group_size : in.groups * in.group_size;
    const bool by_std = in.scale == AdvantageScale::group || in.scale == AdvantageScale::batch;
    if (by_std && divided_by > 0 && in.ddof >= divided_by) return call.hand_to_twin();
    return like_rewards(call, in.rewards, [&](const auto* rewards, auto* out) {
        return group_advantages(rewards, static_cast<size_t>(in.groups), static_cast<size_t>(in.group_size), in.scale,
                                static_cast<double>(in.ddof), in.eps, out);
    });
}

// Reads the group size of `rewards`, (P, G) without a size or (P·G,) with one; returns false for anything else.
bool read_group_size(PyArrayObject* rewards, PyObject* given, npy_intp* group_size) {
    if (PyArray_NDIM(rewards) == 2 && absent(given)) {
        *group_size = PyArray_DIM(rewards, 1);
        return *group_size > 0;
    }
    return PyArray_NDIM(rewards) == 1 && !absent(given) && whole_number(given, 1, NPY_MAX_INTP, group_size) &&
           PyArray_SIZE(rewards) % *group_size == 0;
}

// compute_group_advantages(rewards, *, ddof=0, eps=0.0, lengths=None) -> (G,)
PyObject* group_entry(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* keywords) {
    const Call call{self, args, count, keywords};
    PyObject* slots[4];
    npy_intp ddof;
    double eps;
    PyObject* const names[] = {name_rewards, name_ddof, name_eps, name_lengths};
    PyArrayObject* rewards;
    if (!call.bind(names, 1, slots) || !(rewards = plain_floats(slots[0])) || PyArray_NDIM(rewards) != 1 || !read_ddof(slots[1], &ddof) ||
        !read_eps(slots[2], &eps))
        return call.hand_to_twin();
    if (absent(slots[3])) return advantages(call, {rewards, 1, PyArray_DIM(rewards, 0), ddof, eps, AdvantageScale::group});
    PyArrayObject* lengths = plain_int64(slots[3], 1);
    if (!lengths || !same_shape(lengths, rewards)) return call.hand_to_twin();
    return like_rewards(call, rewards, [&](const auto* values, auto* out) {
        return weighted_advantages(values, data_of<int64_t>(lengths), static_cast<size_t>(PyArray_SIZE(lengths)), static_cast<double>(ddof),
                                   eps, out);
    });
}

// compute_batch_group_advantages(rewards, group_size=None, *, ddof=0, eps=0.0, scale="group") -> same shape
PyObject* batch_entry(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* keywords) {
    const Call call{self, args, count, keywords};
    PyObject* slots[5];
    npy_intp ddof;
    double eps;
    AdvantageScale scale;
    PyObject* const names[] = {name_rewards, name_group_size, name_ddof, name_eps, name_scale};
    PyArrayObject* rewards;
    if (!call.bind(names, 2, slots) || !(rewards = plain_floats(slots[0])) || !read_ddof(slots[2], &ddof) || !read_eps(slots[3], &eps) ||
        !read_scale(slots[4], &scale))
        return call.hand_to_twin();
    npy_intp group_size;
    if (!read_group_size(rewards, slots[1], &group_size)) return call.hand_to_twin();
    return advantages(call, {rewards, PyArray_SIZE(rewards) / group_size, group_size, ddof, eps, scale});
}

// compute_pass_at_k_advantages(rewards, group_size=None, *, k) -> same shape
PyObject* pass_at_k_entry(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* keywords) {
    const Call call{self, args, count, keywords};
    PyObject* slots[3];
    npy_intp group_size, k;
    PyObject* const names[] = {name_rewards, name_group_size, name_k};
    PyArrayObject* rewards;
    if (!call.bind(names, 2, slots) || !(rewards = plain_floats(slots[0])) || !read_group_size(rewards, slots[1], &group_size) ||
        !slots[2] || !whole_number(slots[2], 2, group_size, &k))
        return call.hand_to_twin();
    return like_rewards(call, rewards, [&](const auto* values, auto* out) {
        return pass_at_k_advantages(values, static_cast<size_t>(PyArray_SIZE(rewards) / group_size), static_cast<size_t>(group_size),
                                    static_cast<size_t>(k), out);
    });
}

// ---- generalised advantage estimation ----------------------------------------------------------------------------------

PyObject* name_values;
PyObject* name_gamma;
PyObject* name_lam;

bool read_share(PyObject* o, double otherwise, double* value) {
    *value = otherwise;
    if (!o) return true;
    if (!PyFloat_CheckExact(o)) return false;
    *value = PyFloat_AS_DOUBLE(o);
    return *value >= 0.0 && *value <= 1.0;
}

// compute_gae(rewards, values, *, gamma=1.0, lam=0.95, mask=None) -> same shape
PyObject* gae_entry(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* keywords) {
    const Call call{self, args, count, keywords};
    PyObject* slots[5];
    KlInput in;  // two arrays of one shape and type, and a mask: rewards, values
    double gamma, lam;
    PyObject* const names[] = {name_rewards, name_values, name_gamma, name_lam, name_mask};
    if (!call.bind(names, 2, slots) || !in.read(slots[0], slots[1], slots[4], false) || !read_share(slots[2], 1.0, &gamma) ||
        !read_share(slots[3], 0.95, &lam))
        return call.hand_to_twin();
    const int dimensions = PyArray_NDIM(in.log_p);
    if (dimensions != 1 && dimensions != 2) return call.hand_to_twin();
    const auto rows = static_cast<size_t>(dimensions == 2 ? PyArray_DIM(in.log_p, 0) : 1);
    const auto cols = static_cast<size_t>(PyArray_DIM(in.log_p, dimensions - 1));
    PyObject* out = PyArray_SimpleNew(dimensions, PyArray_DIMS(in.log_p), PyArray_TYPE(in.log_p));
    if (!out) return nullptr;
    void* data = PyArray_DATA(reinterpret_cast<PyArrayObject*>(out));
    auto fill = [&](auto* typed) {
        using T = std::remove_pointer_t<decltype(typed)>;
        gae_rows<T>(data_of<T>(in.log_p), data_of<T>(in.log_q), in.mask, rows, cols, gamma, lam, typed);
    };
    const bool done = compute(in.size() >= kReleaseElements, [&] {
        in.is_f32() ? fill(static_cast<float*>(data)) : fill(static_cast<double*>(data));
    });
    if (done) return out;
    Py_DECREF(out);
    return nullptr;
}

// ---- entry points -----------------------------------------------------------------------------------------------------

using FastCall = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t, PyObject*);

struct EntryPoint {
    const char* name;
    FastCall call;
};

constexpr EntryPoint kEntryPoints[] = {
    {"compute_group_advantages", group_entry},
    {"compute_batch_group_advantages", batch_entry},
    {"compute_pass_at_k_advantages", pass_at_k_entry},
    {"compute_gae", gae_entry},
    {"compute_token_kl", kl_total<KlEstimator::token, false>},
    {"compute_token_kl_f32", kl_total<KlEstimator::token, true>},
    {"compute_token_kl_schulman", kl_total<KlEstimator::schulman, false>},
    {"compute_token_kl_schulman_f32", kl_total<KlEstimator::schulman, true>},
    {"compute_batch_token_kl", kl_batch<KlEstimator::token, false>},
    {"compute_batch_token_kl_f32", kl_batch<KlEstimator::token, true>},
    {"compute_batch_token_kl_schulman", kl_batch<KlEstimator::schulman, false>},
    {"compute_batch_token_kl_schulman_f32", kl_batch<KlEstimator::schulman, true>},
};

// The builtin and its definition live as long as the process.
nb::object entry_point(const std::string& name, nb::object twin, const std::string& doc, const std::string& module_name) {
    for (const EntryPoint& entry : kEntryPoints) {
        if (name != entry.name) continue;
        const char* kept_doc = (new std::string(doc))->c_str();
        auto* method = new PyMethodDef{entry.name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(entry.call)),
                                       METH_FASTCALL | METH_KEYWORDS, kept_doc};
        nb::object self = twin;
        if (!twin.is_none()) {
            self = nb::steal(PyModule_New(module_name.c_str()));
            nb::setattr(self, "twin", twin);
        }
        return nb::steal(PyCFunction_NewEx(method, self.ptr(), nb::str(module_name.c_str()).ptr()));
    }
    throw nb::value_error(("no compiled primitive is called " + name).c_str());
}

// ---- packing ----------------------------------------------------------------------------------------------------------

const char kNotPrepared[] = "strop's compiled packing was called with arrays the Python side should have prepared";

PyObject* list_of_bins(const std::vector<std::vector<int64_t>>& bins) {
    nb::object result = nb::steal(PyList_New(static_cast<Py_ssize_t>(bins.size())));
    for (size_t b = 0; result.is_valid() && b < bins.size(); ++b) {
        PyObject* bin = PyList_New(static_cast<Py_ssize_t>(bins[b].size()));
        if (!bin) return nullptr;
        PyList_SET_ITEM(result.ptr(), static_cast<Py_ssize_t>(b), bin);
        for (size_t i = 0; i < bins[b].size(); ++i) {
            PyObject* index = PyLong_FromLongLong(bins[b][i]);
            if (!index) return nullptr;
            PyList_SET_ITEM(bin, static_cast<Py_ssize_t>(i), index);
        }
    }
    return result.release().ptr();
}

// pack(lengths, max_length) -> list of bins
PyObject* pack(PyObject*, PyObject* args) {
    PyObject* object;
    long long max_length;
    if (!PyArg_ParseTuple(args, "OL", &object, &max_length)) return nullptr;
    PyArrayObject* lengths = plain_int64(object, 1);
    if (!lengths) return PyErr_Format(PyExc_RuntimeError, kNotPrepared);
    std::vector<std::vector<int64_t>> bins;
    auto body = [&] { bins = first_fit_decreasing(data_of<int64_t>(lengths), static_cast<size_t>(PyArray_SIZE(lengths)), max_length); };
    return compute(true, body) ? list_of_bins(bins) : nullptr;
}

// collate(arrays, order, row_ends, pad_id, input_ids, position_ids, labels, sequence_ids) -> cu_seqlens; fills the last four
PyObject* collate(PyObject*, PyObject* args) {
    PyObject *list, *order_object, *ends_object, *row_objects[4];
    long long pad_id;
    if (!PyArg_ParseTuple(args, "O!OOLOOOO", &PyList_Type, &list, &order_object, &ends_object, &pad_id, &row_objects[0], &row_objects[1],
                          &row_objects[2], &row_objects[3]))
        return nullptr;
    PyArrayObject *order = plain_int64(order_object, 1), *row_ends = plain_int64(ends_object, 1), *rows[4];
    bool prepared = order && row_ends;
    for (int i = 0; i < 4; ++i) prepared = prepared && (rows[i] = plain_int64(row_objects[i], 2)) && PyArray_ISWRITEABLE(rows[i]);
    std::vector<Sequence> sequences;
    for (Py_ssize_t i = 0; prepared && i < PyList_GET_SIZE(list); ++i) {
        PyArrayObject* tokens = plain_int64(PyList_GET_ITEM(list, i), 1);
        prepared = tokens != nullptr;
        if (tokens) sequences.push_back({data_of<int64_t>(tokens), static_cast<size_t>(PyArray_SIZE(tokens))});
    }
    if (!prepared) return PyErr_Format(PyExc_RuntimeError, kNotPrepared);

    auto data = [&](int i) { return static_cast<int64_t*>(PyArray_DATA(rows[i])); };
    std::vector<int32_t> cu_seqlens;
    auto body = [&] {
        cu_seqlens = collate_rows(sequences, data_of<int64_t>(order), data_of<int64_t>(row_ends), static_cast<size_t>(PyArray_DIM(rows[0], 0)),
                                  static_cast<size_t>(PyArray_DIM(rows[0], 1)), pad_id, {data(0), data(1), data(2), data(3)});
    };
    if (!compute(true, body)) return nullptr;
    npy_intp count = static_cast<npy_intp>(cu_seqlens.size());
    PyObject* result = PyArray_SimpleNew(1, &count, NPY_INT32);
    if (result) std::copy(cu_seqlens.begin(), cu_seqlens.end(), static_cast<int32_t*>(PyArray_DATA(reinterpret_cast<PyArrayObject*>(result))));
    return result;
}

PyMethodDef kPacking[] = {{"pack", pack, METH_VARARGS, "Bins of indices, first-fit decreasing."},
                          {"collate", collate, METH_VARARGS, "Fills the rows of a packed batch; cu_seqlens."},
                          {nullptr, nullptr, 0, nullptr}};

}  // namespace

void define_primitives(nb::module_& m) {
    if (_import_array() < 0) throw nb::python_error();
    auto intern = [](const char* word) {
        PyObject* s = PyUnicode_InternFromString(word);
        if (!s) throw nb::python_error();
        return s;
    };
    name_log_p = intern("log_p");
    name_log_q = intern("log_q");
    name_seq_len = intern("seq_len");
    name_mask = intern("mask");
    name_rewards = intern("rewards");
    name_values = intern("values");
    name_gamma = intern("gamma");
    name_lam = intern("lam");
    name_group_size = intern("group_size");
    name_ddof = intern("ddof");
    name_eps = intern("eps");
    name_scale = intern("scale");
    name_lengths = intern("lengths");
    name_k = intern("k");
    for (size_t i = 0; i < std::size(scale_words); ++i) scale_words[i] = intern(kScaleWords[i]);

    m.def("entry_point", &entry_point, nb::arg("name"), nb::arg("twin").none(), nb::arg("doc"), nb::arg("module_name"),
          "The compiled primitive of this name; calls it does not compute itself go to `twin`.");
    if (PyModule_AddFunctions(m.ptr(), kPacking) < 0) throw nb::python_error();
}

}  // namespace strop
