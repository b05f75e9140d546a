// The transformer as an object: references to its weights, memory reused between passes, and KV caches.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "model.h"

namespace strop::moe {

// Returns the number of elements of every parameter, in the order of the constructor's arguments.
std::vector<size_t> parameter_sizes(const Config& config);

// Arenas for future passes. Passes may run at the same time, each with its own arena.
class Arenas {
  public:
    std::unique_ptr<Arena> borrow();
    void give_back(std::unique_ptr<Arena> arena);
    size_t capacity();  // bytes in the unused arenas

  private:
    std::mutex mutex_;
    std::vector<std::unique_ptr<Arena>> free_;
};

// Rows of token ids; mask may be null (all real), otherwise a byte is 0 at padding.
struct Batch {
    const int64_t* tokens_BT;
    const uint8_t* mask_BT;
    size_t B, T;
};

// The keys and values of B rows, for every layer.
template <class T>
class Cache {
  public:
    Cache(const Config& config, size_t B, size_t capacity);
    Cache select_rows(const int64_t* rows, size_t count) const;
    // Copies the first `length` tokens of a row of another cache, of any capacity, to row `to`.
    void copy_row(size_t to, const Cache& from, size_t row, size_t length);
    std::vector<KeysValues<T>> layers();
    size_t rows() const { return B_; }
    size_t capacity() const { return capacity_; }

    // Returns the elements per row of one layer; returns views of the layers of a cache stored in `data`.
    static size_t row_elements(const Config& config, size_t S) { return config.K * S * (config.C + padded(config.C)); }
    static std::vector<KeysValues<T>> layers_in(T* data, const Config& config, size_t B, size_t S);

  private:
    Config config_;
    size_t B_, capacity_, S_;
    std::unique_ptr<T[]> data_;  // [layer][keys of every row, values of every row]
};

// A pass and its memory, which is returned to the pool when the pass ends.
template <class T>
struct OwnedPass {
    OwnedPass(std::shared_ptr<Arenas> arenas);
    ~OwnedPass();
    OwnedPass(const OwnedPass&) = delete;

    std::shared_ptr<Arenas> arenas;
    std::unique_ptr<Arena> arena;
    std::shared_ptr<std::vector<T>> rope;
    Pass<T> pass{};
    int64_t* rows_N = nullptr;  // place of token n in the flattened batch with padding
    Transposed<T> transposed{};
    Scores<T> scores{};  // of `logps_saved`
};

// The options of `generate` and the arrays for its results. Each prompt has num_samples consecutive rows.
struct Completion {
    size_t capacity;  // tokens of the longest finished row
    size_t max_new_tokens, num_samples;
    Sampling rule;
    const int64_t* ends;  // tokens that end a row
    size_t num_ends;
    const double* uniforms_BT;
    int64_t* tokens_BT;  // not written after the end of a row; the same holds for logps
    double* logps_BT;
    int64_t* lengths_B;
};

// A batch whose rows continue those of a cache. The cache holds held_B[b] tokens of row b; the batch's tokens are appended.
template <class T>
struct Held {
    Cache<T>& cache;
    const int64_t* held_B;
};

template <class T>
class Engine {
  public:
    // weights: every parameter in the order of MoEConfig.parameter_shapes(). They must outlive the engine.
    Engine(const Config& config, double rope_theta, size_t max_seq_len, const std::vector<T*>& weights);

    // Logits at padding are not written.
    void forward(const Batch& batch, T* logits_BTV);
    std::unique_ptr<OwnedPass<T>> forward_saved(const Batch& batch, T* logits_BTV);
    void backward(OwnedPass<T>& saved, const T* dlogits_BTV, double daux, const std::vector<T*>& grads);
    double loss_and_grads(const Batch& batch, const int64_t* targets_BT, const uint8_t* counts_BT, double aux_coef,
                          const std::vector<T*>& grads);
    // Writes the log-probs of the tokens that count under softmax(logits/temperature), given the earlier tokens of their rows, and
    // the entropies; both are not written elsewhere. A prefix that rows share is computed once. Tokens after the last one that
    // counts are not computed.
    void logps(const Batch& batch, const uint8_t* counts_BT, double temperature, double* logps_BT, double* entropy_BT);
    std::unique_ptr<OwnedPass<T>> logps_saved(const Batch& batch, const uint8_t* counts_BT, double temperature, double* logps_BT,
                                              double* entropy_BT);
    // dentropy may be null: zeros.
    void logps_backward(OwnedPass<T>& saved, const double* dlogps_BT, const double* dentropy_BT, const std::vector<T*>& grads);
    // Writes the logits after each row's last token.
    void prefill(const Batch& batch, const Held<T>& held, T* logits_BV);
    // Calls `going_on` before every further token. If it returns false, generate stops with the tokens so far and returns false.
    // held may be null; otherwise num_samples is 1, and the cache holds at the end all of each row except its last token.
    bool generate(const Batch& prompts, const Completion& wanted, const Held<T>* held, const std::function<bool()>& going_on);

    const Config& config() const { return config_; }
    size_t workspace_bytes() { return arenas_->capacity(); }

  private:
    // Row b of the batch is row b·row_step of the caches, after the first held_B[b] tokens there (null: none).
    std::unique_ptr<OwnedPass<T>> start(const Batch& batch, bool saving, size_t row_step = 1, const int64_t* held_B = nullptr);
    std::unique_ptr<OwnedPass<T>> start_scores(const Batch& batch, const uint8_t* counts_BT, bool saving);
    std::unique_ptr<OwnedPass<T>> score(const Batch& batch, const uint8_t* counts_BT, double temperature, bool saving, double* logps_BT,
                                        double* entropy_BT);
    std::shared_ptr<std::vector<T>> rope_table(size_t positions);
    void prepare_positions(OwnedPass<T>& owned, size_t positions);

    Config config_;
    double rope_theta_;
    size_t max_seq_len_;
    std::vector<LayerWeights<T>> layers_;
    Weights<T> weights_;
    std::shared_ptr<Arenas> arenas_ = std::make_shared<Arenas>();
    std::mutex rope_mutex_;
    std::shared_ptr<std::vector<T>> rope_;  // cosines of all positions, then the sines
};

}  // namespace strop::moe
