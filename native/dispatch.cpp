#include "dispatch.h"

#include <atomic>

namespace strop {

#define STROP_DECLARE(isa, T, suffix)                          \
    namespace isa {                                            \
    extern const KlBlock<T> token_kl_##suffix;                 \
    extern const KlBlock<T> schulman_kl_##suffix;              \
    extern const RewardSum<T> reward_sum_##suffix;             \
    extern const RewardSquares<T> reward_squares_##suffix;     \
    extern const GroupAdvantages<T> group_advantages_##suffix; \
    extern const moe::Kernels<T> moe_##suffix;                 \
    }

#define STROP_TYPED(isa, suffix)                                                           \
    {isa::token_kl_##suffix, isa::schulman_kl_##suffix, isa::reward_sum_##suffix,          \
     isa::reward_squares_##suffix, isa::group_advantages_##suffix, &isa::moe_##suffix}

#define STROP_ISA_TABLE(isa)                                                               \
    STROP_DECLARE(isa, float, f32)                                                         \
    STROP_DECLARE(isa, double, f64)                                                        \
    static const Kernels& table_##isa() {                                                  \
        static const Kernels table{#isa, STROP_TYPED(isa, f32), STROP_TYPED(isa, f64)};    \
        return table;                                                                      \
    }

STROP_ISA_TABLE(baseline)
#ifdef STROP_HAS_X86_ISAS
STROP_ISA_TABLE(avx2)
STROP_ISA_TABLE(avx512)
#endif

static std::vector<const Kernels*> runnable() {
    std::vector<const Kernels*> tables;
#ifdef STROP_HAS_X86_ISAS
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512bw"))
        tables.push_back(&table_avx512());
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) tables.push_back(&table_avx2());
#endif
    tables.push_back(&table_baseline());
    return tables;
}

static const Kernels* find(const std::string& name) {
    for (const Kernels* table : runnable())
        if (name == table->isa) return table;
    return nullptr;
}

static std::atomic<const Kernels*>& current() {
    static std::atomic<const Kernels*> table{runnable().front()};
    return table;
}

const Kernels& kernels() { return *current().load(std::memory_order_relaxed); }

std::vector<std::string> available_isas() {
    std::vector<std::string> names;
    for (const Kernels* table : runnable()) names.emplace_back(table->isa);
    return names;
}

bool set_isa(const std::string& name) {
    const Kernels* table = find(name);
    if (table) current() = table;
    return table != nullptr;
}

}  // namespace strop
