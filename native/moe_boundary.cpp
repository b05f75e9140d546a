// The boundary between Python and the transformer: turns the arrays that strop.moe.native prepared into pointers.
#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION NPY_2_0_API_VERSION
#include "moe_boundary.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>
#include <numpy/arrayobject.h>

#include <chrono>
#include <cmath>
#include <optional>
#include <thread>

#include "dispatch.h"
#include "moe/engine.h"
#include "moe/sampling.h"

namespace nb = nanobind;

namespace strop {
namespace {

using namespace moe;

template <class T, int axes>
using Array = nb::ndarray<T, nb::ndim<axes>, nb::c_contig, nb::device::cpu>;
template <class T>
using AnyShape = nb::ndarray<T, nb::c_contig, nb::device::cpu>;
using Ids = Array<const int64_t, 2>;
using Mask = std::optional<Array<const bool, 2>>;

const uint8_t* bytes_of(const Mask& mask) { return mask ? reinterpret_cast<const uint8_t*>(mask->data()) : nullptr; }

Batch batch_of(const Ids& tokens_BT, const Mask& mask_BT) {
    return {tokens_BT.data(), bytes_of(mask_BT), tokens_BT.shape(0), tokens_BT.shape(1)};
}

template <class T>
std::vector<T*> pointers(const std::vector<AnyShape<T>>& arrays) {
    std::vector<T*> data;
    data.reserve(arrays.size());
    for (const AnyShape<T>& array : arrays) data.push_back(array.data());
    return data;
}

// Takes the interpreter's lock by calling take(). When the process ends, Python terminates a thread that asks for the lock by
// unwinding its stack, and destructors on the way would abort the process. So the thread waits here until the process is gone.
template <class Take>
auto take_lock(Take&& take) noexcept {
    try {
        return take();
    } catch (...) {  // these functions throw nothing else
        for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
    }
}

class Release {
  public:
    Release() : state_(PyEval_SaveThread()) {}
    ~Release() {
        take_lock([this] { PyEval_RestoreThread(state_); });
    }
    Release(const Release&) = delete;

  private:
    PyThreadState* state_;
};

// Returns an array of a list that Python prepared, through NumPy's own interface. With the general one, handing over the arrays
// of a step takes longer than a small model's optimiser.
template <class T>
PyArrayObject* array_of(nb::handle object) {
    auto* array = reinterpret_cast<PyArrayObject*>(object.ptr());
    constexpr int type = sizeof(T) == sizeof(float) ? NPY_FLOAT : NPY_DOUBLE;
    if (!PyArray_Check(object.ptr()) || PyArray_TYPE(array) != type || !PyArray_ISCARRAY(array))
        throw nb::type_error("parameters and gradients must be contiguous, writable NumPy arrays of one float type");
    return array;
}

template <class T>
T* data_of(nb::handle object, size_t count) {
    PyArrayObject* array = array_of<T>(object);
    if (static_cast<size_t>(PyArray_SIZE(array)) != count) throw nb::value_error("a gradient or moment has another size than its parameter");
    return static_cast<T*>(PyArray_DATA(array));
}

template <class T>
std::vector<T*> data_of_all(const nb::list& arrays, const std::vector<size_t>& counts) {
    if (arrays.size() != counts.size()) throw nb::value_error("there must be as many gradients as parameters");
    std::vector<T*> data;
    data.reserve(arrays.size());
    for (size_t i = 0; i < counts.size(); ++i) data.push_back(data_of<T>(arrays[i], counts[i]));
    return data;
}

// Returns false once a signal handler has raised, as Ctrl-C's does. This needs the interpreter's lock, so it is called only now
// and then.
struct Interrupts {
    using Clock = std::chrono::steady_clock;
    Clock::time_point asked = Clock::now();

    bool operator()() {
        const Clock::time_point now = Clock::now();
        if (now - asked < std::chrono::milliseconds(50)) return true;
        asked = now;
        const PyGILState_STATE state = take_lock([] { return PyGILState_Ensure(); });
        const bool go_on = PyErr_CheckSignals() == 0;
        PyGILState_Release(state);
        return go_on;
    }
};

template <class T>
void define_engine(nb::module_& m, const char* engine_name, const char* pass_name, const char* cache_name, const char* adamw_name) {
    using Arrays = std::vector<AnyShape<T>>;

    nb::class_<OwnedPass<T>>(m, pass_name);
    nb::class_<Cache<T>>(m, cache_name)
        .def("select_rows", [](const Cache<T>& cache, Array<const int64_t, 1> rows) {
            Release release;
            return cache.select_rows(rows.data(), rows.shape(0));
        })
        .def("copy_row", [](Cache<T>& cache, size_t to, const Cache<T>& from, size_t row, size_t length) {
            if (to >= cache.rows() || row >= from.rows() || length > cache.capacity() || length > from.capacity())
                throw nb::value_error("a row of a cache, or its length, is beyond the cache");
            Release release;
            cache.copy_row(to, from, row, length);
        });

    nb::class_<Engine<T>>(m, engine_name)
        .def(
            "__init__",
            [](Engine<T>* self, size_t num_layers, size_t hidden_dim, size_t num_heads, size_t num_kv_heads, size_t head_dim,
               size_t num_experts, size_t top_k, size_t intermediate_dim, size_t vocab_size, size_t max_seq_len, double rms_norm_eps,
               double rope_theta, bool tie_embeddings, const Arrays& params) {
                const Config config{num_layers, hidden_dim,       num_heads,  num_kv_heads, head_dim,      num_experts,
                                    top_k,      intermediate_dim, vocab_size, rms_norm_eps, tie_embeddings};
                new (self) Engine<T>(config, rope_theta, max_seq_len, pointers(params));
            },
            nb::kw_only(), nb::arg("num_layers"), nb::arg("hidden_dim"), nb::arg("num_heads"), nb::arg("num_kv_heads"), nb::arg("head_dim"),
            nb::arg("num_experts"), nb::arg("top_k"), nb::arg("intermediate_dim"), nb::arg("vocab_size"), nb::arg("max_seq_len"),
            nb::arg("rms_norm_eps"), nb::arg("rope_theta"), nb::arg("tie_embeddings"), nb::arg("params"))
        .def("forward", [](Engine<T>& self, Ids tokens_BT, Mask mask_BT, Array<T, 3> logits_BTV) {
            Release release;
            self.forward(batch_of(tokens_BT, mask_BT), logits_BTV.data());
        }, nb::arg(), nb::arg().none(), nb::arg())
        .def("forward_saved", [](Engine<T>& self, Ids tokens_BT, Mask mask_BT, Array<T, 3> logits_BTV) {
            Release release;
            return self.forward_saved(batch_of(tokens_BT, mask_BT), logits_BTV.data());
        }, nb::arg(), nb::arg().none(), nb::arg())
        .def("aux_loss", [](Engine<T>&, OwnedPass<T>& saved) { return saved.pass.aux_loss; })
        .def("backward", [](Engine<T>& self, OwnedPass<T>& saved, Array<const T, 3> dlogits_BTV, double daux, const nb::list& grads) {
            const std::vector<T*> out = data_of_all<T>(grads, parameter_sizes(self.config()));
            Release release;
            self.backward(saved, dlogits_BTV.data(), daux, out);
        })
        .def("logps", [](Engine<T>& self, Ids tokens_BT, Mask mask_BT, Array<const bool, 2> counts_BT, double temperature, Array<double, 2> logps_BT,
                         Array<double, 2> entropy_BT) {
            Release release;
            self.logps(batch_of(tokens_BT, mask_BT), bytes_of(counts_BT), temperature, logps_BT.data(), entropy_BT.data());
        }, nb::arg(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg(), nb::arg())
        .def("logps_saved", [](Engine<T>& self, Ids tokens_BT, Mask mask_BT, Array<const bool, 2> counts_BT, double temperature,
                               Array<double, 2> logps_BT, Array<double, 2> entropy_BT) {
            Release release;
            return self.logps_saved(batch_of(tokens_BT, mask_BT), bytes_of(counts_BT), temperature, logps_BT.data(), entropy_BT.data());
        }, nb::arg(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg(), nb::arg())
        .def("logps_backward", [](Engine<T>& self, OwnedPass<T>& saved, Array<const double, 2> dlogps_BT,
                                  std::optional<Array<const double, 2>> dentropy_BT, const nb::list& grads) {
            const std::vector<T*> out = data_of_all<T>(grads, parameter_sizes(self.config()));
            Release release;
            self.logps_backward(saved, dlogps_BT.data(), dentropy_BT ? dentropy_BT->data() : nullptr, out);
        }, nb::arg(), nb::arg(), nb::arg().none(), nb::arg())
        .def("loss_and_grads", [](Engine<T>& self, Ids tokens_BT, Ids targets_BT, Mask target_mask_BT, Mask mask_BT, double aux_coef, const nb::list& grads) {
            const std::vector<T*> out = data_of_all<T>(grads, parameter_sizes(self.config()));
            Release release;
            return self.loss_and_grads(batch_of(tokens_BT, mask_BT), targets_BT.data(), bytes_of(target_mask_BT), aux_coef, out);
        }, nb::arg(), nb::arg(), nb::arg().none(), nb::arg().none(), nb::arg(), nb::arg())
        .def("prefill", [](Engine<T>& self, Ids tokens_BT, Mask mask_BT, Cache<T>& cache, Array<const int64_t, 1> held_B, Array<T, 2> logits_BV) {
            Release release;
            self.prefill(batch_of(tokens_BT, mask_BT), {cache, held_B.data()}, logits_BV.data());
        }, nb::arg(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg())
        .def("new_cache", [](Engine<T>& self, size_t B, size_t capacity) { return Cache<T>(self.config(), B, capacity); })
        .def("generate", [](Engine<T>& self, Ids tokens_BT, Mask mask_BT, size_t capacity, size_t num_samples, double temperature, int64_t top_k,
                            double top_p, Array<const int64_t, 1> ends, Array<const double, 2> uniforms_BT, Array<int64_t, 2> new_BT,
                            Array<double, 2> logps_BT, Array<int64_t, 1> lengths_B, Cache<T>* cache, std::optional<Array<const int64_t, 1>> held_B) {
            if (cache && (cache->rows() != tokens_BT.shape(0) || cache->capacity() < capacity || num_samples != 1 || !held_B))
                throw nb::value_error("a cache must have a row for each prompt, room for the completions, and what it holds");
            std::optional<Held<T>> held;
            if (cache) held.emplace(Held<T>{*cache, held_B->data()});
            const Completion wanted{capacity, new_BT.shape(1), num_samples, {temperature, top_k, top_p}, ends.data(), ends.shape(0),
                                    uniforms_BT.data(), new_BT.data(), logps_BT.data(), lengths_B.data()};
            bool finished;
            {
                Release release;
                finished = self.generate(batch_of(tokens_BT, mask_BT), wanted, held ? &*held : nullptr, Interrupts{});
            }
            if (!finished) throw nb::python_error();
        }, nb::arg(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
           nb::arg().none(), nb::arg().none())
        .def("workspace_bytes", &Engine<T>::workspace_bytes);

    // One function for float and one for double. The array's type decides which, so nanobind must not convert it.
    m.def("moe_sample", [](Array<const T, 2> logits_BV, Array<const double, 1> uniforms_B, double temperature, int64_t top_k, double top_p,
                           Array<int64_t, 1> tokens_B, Array<double, 1> logps_B) {
        Release release;
        static Arenas& arenas = *new Arenas;  // never destroyed: a thread may still sample when the process ends
        std::unique_ptr<Arena> arena = arenas.borrow();
        arena->reset();
        sample(*arena, logits_BV.data(), uniforms_B.data(), logits_BV.shape(0), logits_BV.shape(1), {temperature, top_k, top_p},
               tokens_B.data(), logps_B.data());
        arenas.give_back(std::move(arena));
    }, nb::arg().noconvert(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg());
    m.def(adamw_name, [](const nb::list& params, const nb::list& grads, const nb::list& ms, const nb::list& vs, const std::vector<double>& decays,
                         int64_t step, double lr, double beta1, double beta2, double eps, double grad_scale) {
        std::vector<Updated<T>> arrays(params.size());
        if (grads.size() != arrays.size() || ms.size() != arrays.size() || vs.size() != arrays.size() || decays.size() != arrays.size())
            throw nb::value_error("AdamW needs as many gradients, moments and weight decays as parameters");
        for (size_t i = 0; i < arrays.size(); ++i) {
            const size_t count = static_cast<size_t>(PyArray_SIZE(array_of<T>(params[i])));
            arrays[i] = {count, data_of<T>(params[i], count), data_of<T>(grads[i], count), data_of<T>(ms[i], count), data_of<T>(vs[i], count), decays[i], 0};
        }
        const AdamW update{lr, beta1, beta2, eps, grad_scale, 1 - std::pow(beta1, static_cast<double>(step)),
                           std::sqrt(1 - std::pow(beta2, static_cast<double>(step)))};
        Release release;
        kernels().of<T>().moe->adamw(arrays.data(), arrays.size(), update);
    });
}

}  // namespace

// Single parts of the engine, for benchmarks (benchmarks/contenders/moe_kernels.py).
void define_parts(nb::module_& m) {
    using Matrix = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;

    struct Products {
        std::vector<Matrix> a;
        std::vector<Array<const float, 2>> b;
        std::vector<Array<float, 2>> c;
        std::vector<Multiplication<float>> list;
        Arena arena;
    };
    nb::class_<Products>(m, "MoEProducts")
        .def("__init__", [](Products* self, std::vector<Matrix> a, std::vector<Array<const float, 2>> b, std::vector<Array<float, 2>> c) {
            new (self) Products{std::move(a), std::move(b), std::move(c), {}, {}};
            for (size_t i = 0; i < self->a.size(); ++i) {
                const Matrix& left = self->a[i];
                self->list.push_back({left.shape(0), self->b[i].shape(1), left.shape(1), left.data(), static_cast<size_t>(left.stride(0)),
                                      static_cast<size_t>(left.stride(1)), self->b[i].data(), self->c[i].data()});
            }
        })
        .def("run", [](Products& self) {
            Release release;
            self.arena.reset();
            kernels().of<float>().moe->multiply_all(self.list.data(), self.list.size(), self.arena);
        });
    m.def("moe_softmax", [](Array<const float, 1> logits_V, Array<double, 1> p_V, Array<double, 1> sums) {
        return kernels().of<float>().moe->softmax_row(logits_V.data(), logits_V.shape(0), 1.0, p_V.data(), sums.data());
    });
    m.def("moe_rms_norm", [](Array<const float, 2> x_DN, Array<const float, 1> w_D, double eps, Array<float, 2> y_DN, Array<float, 1> r_N) {
        kernels().of<float>().moe->rms_norm(x_DN.shape(0), eps, x_DN.shape(1), x_DN.data(), w_D.data(), y_DN.data(), r_N.data());
    });
}

void define_moe(nb::module_& m) {
    if (_import_array() < 0) throw nb::python_error();
    define_engine<float>(m, "MoEEngineF32", "MoEPassF32", "MoECacheF32", "moe_adamw_f32");
    define_engine<double>(m, "MoEEngineF64", "MoEPassF64", "MoECacheF64", "moe_adamw_f64");
    define_parts(m);
}

}  // namespace strop
