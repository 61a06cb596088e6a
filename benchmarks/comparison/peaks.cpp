// How fast this machine reads memory and multiplies, with nothing else in the way.
//
// Compiled for the machine that runs it (-march=native): the widest vectors that it has are used.

#include <sys/mman.h>
#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr std::size_t kVectorBytes = 64;
#elif defined(__AVX__)
constexpr std::size_t kVectorBytes = 32;
#else
constexpr std::size_t kVectorBytes = 16;
#endif
typedef float Floats __attribute__((vector_size(kVectorBytes)));
typedef std::uint64_t Words __attribute__((vector_size(kVectorBytes)));
constexpr std::size_t kFloats = kVectorBytes / sizeof(float);

// Sums that are added up at the same time, so that no multiply-add waits for the one before it: a core starts two in a
// cycle and has each after four or five, dot products after six and more. Twelve and their operands fit into sixteen
// registers, 24 into the 32 of AVX-512: with twelve a Zen 5 gave 7 percent fewer dot products.
#if defined(__AVX512F__)
constexpr int kSums = 24;
#else
constexpr int kSums = 12;
#endif
constexpr int kRepeats = 4096;

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Runs `work(index)` on so many threads at once. Seconds from the common start to the last one's end.
template <typename Work>
double timed(int threads, Work work) {
    std::atomic<int> waiting{threads};
    std::vector<double> starts(threads), ends(threads);
    std::vector<std::thread> team;
    auto run = [&](int index) {
        waiting.fetch_sub(1);
        while (waiting.load() > 0) std::this_thread::yield();
        starts[index] = now();
        work(index);
        ends[index] = now();
    };
    for (int index = 1; index < threads; ++index) team.emplace_back(run, index);
    run(0);
    for (auto& thread : team) thread.join();
    double start = starts[0], end = ends[0];
    for (int index = 1; index < threads; ++index) {
        start = starts[index] < start ? starts[index] : start;
        end = ends[index] > end ? ends[index] : end;
    }
    return end - start;
}

// What the compiler must not know, and what it must not leave out.
volatile float volatile_factor = 1e-6f;
volatile float volatile_sink;
volatile std::uint64_t volatile_words;

void read_all(const Words* words, std::size_t count) {
    Words sums[8] = {};
    for (std::size_t index = 0; index + 8 <= count; index += 8) {
        for (int lane = 0; lane < 8; ++lane) sums[lane] += words[index + lane];
    }
    Words sum = sums[0];
    for (int lane = 1; lane < 8; ++lane) sum += sums[lane];
    volatile_words = sum[0];
}

void multiply_fp32() {
    const Floats factor = Floats{} + volatile_factor, term = Floats{} + volatile_factor;
    Floats sums[kSums];
    for (auto& sum : sums) sum = term;
    for (int repeat = 0; repeat < kRepeats; ++repeat) {
#pragma GCC unroll 24
        for (int index = 0; index < kSums; ++index) sums[index] = sums[index] * factor + term;
    }
    float total = 0;
    for (auto& sum : sums) total += sum[0];
    volatile_sink = total;
}

#if defined(__AVX512BF16__)
constexpr std::size_t kDotFlops = 64;  // 16 sums of two products
void multiply_bf16() {
    const __m512bh factor = _mm512_cvtne2ps_pbh(_mm512_set1_ps(volatile_factor), _mm512_set1_ps(volatile_factor));
    __m512 sums[kSums];
    for (auto& sum : sums) sum = _mm512_set1_ps(volatile_factor);
    for (int repeat = 0; repeat < kRepeats; ++repeat) {
#pragma GCC unroll 24
        for (int index = 0; index < kSums; ++index) sums[index] = _mm512_dpbf16_ps(sums[index], factor, factor);
    }
    float total = 0;
    for (auto& sum : sums) total += _mm512_cvtss_f32(sum);
    volatile_sink = total;
}
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
constexpr std::size_t kDotFlops = 16;  // 4 sums of two products
void multiply_bf16() {
    const bfloat16x8_t factor = vreinterpretq_bf16_u16(vdupq_n_u16(volatile_factor > 0 ? 0x3586 : 0));
    float32x4_t sums[kSums];
    for (auto& sum : sums) sum = vdupq_n_f32(volatile_factor);
    for (int repeat = 0; repeat < kRepeats; ++repeat) {
#pragma GCC unroll 24
        for (int index = 0; index < kSums; ++index) sums[index] = vbfdotq_f32(sums[index], factor, factor);
    }
    float total = 0;
    for (auto& sum : sums) total += vgetq_lane_f32(sum, 0);
    volatile_sink = total;
}
#else
constexpr std::size_t kDotFlops = 0;
void multiply_bf16() {}
#endif

#if defined(__AMX_BF16__)
constexpr std::size_t kTileFlops = 16 * 16 * 32 * 2;

// Linux gives a process the tiles' state when it asks for it: ARCH_REQ_XCOMP_PERM of XFEATURE_XTILEDATA.
bool may_use_tiles() {
    static const bool granted = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
    return granted;
}

void multiply_tiles() {
    struct alignas(64) Shapes {
        std::uint8_t palette = 1, reserved[15] = {};
        std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } shapes;
    asm volatile("ldtilecfg %0" : : "m"(shapes));
    alignas(64) float sums[16 * 16];
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
    static_assert(kSums % 4 == 0, "four sums at a time");
    for (int repeat = 0; repeat < kRepeats * kSums / 4; ++repeat) {
        _tile_dpbf16ps(0, 4, 5);
        _tile_dpbf16ps(1, 4, 5);
        _tile_dpbf16ps(2, 4, 5);
        _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, sums, 64);
    _tile_release();
    volatile_sink = sums[0];
}
#else
constexpr std::size_t kTileFlops = 0;
bool may_use_tiles() { return false; }
void multiply_tiles() {}
#endif

template <typename Multiply>
double flops(int threads, double seconds, std::size_t flops_per_vector, Multiply multiply) {
    std::vector<std::size_t> counts(threads);
    const double taken = timed(threads, [&](int index) {
        const double end = now() + seconds;
        std::size_t count = 0;
        do {
            multiply();
            ++count;
        } while (now() < end);
        counts[index] = count;
    });
    std::size_t total = 0;
    for (std::size_t count : counts) total += count;
    return static_cast<double>(total) * kSums * kRepeats * flops_per_vector / taken;
}

}  // namespace

extern "C" {

// Memory on huge pages where the system gives them, written once by the threads that will read it; null: none left.
void* peaks_buffer(std::size_t bytes, int threads) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return nullptr;
#ifdef MADV_HUGEPAGE
    madvise(memory, bytes, MADV_HUGEPAGE);
#endif
    auto* words = static_cast<std::uint64_t*>(memory);
    const std::size_t each = bytes / sizeof(std::uint64_t) / threads;
    timed(threads, [&](int index) {
        for (std::size_t word = 0; word < each; ++word) words[index * each + word] = word;
    });
    return memory;
}

void peaks_free(void* memory, std::size_t bytes) { munmap(memory, bytes); }

// Seconds in which the threads read the memory once, each its own slice from the first byte to the last.
double peaks_read(const void* memory, std::size_t bytes, int threads) {
    const auto* words = static_cast<const Words*>(memory);
    const std::size_t each = bytes / sizeof(Words) / threads;
    return timed(threads, [&](int index) { read_all(words + index * each, each); });
}

// Multiplications and additions per second, for about so many seconds.
double peaks_fp32(int threads, double seconds) { return flops(threads, seconds, 2 * kFloats, multiply_fp32); }

// The same with dot products of bfloat16 pairs, in tiles if there are any; 0 where the processor has none.
double peaks_bf16(int threads, double seconds) {
    if (may_use_tiles()) return flops(threads, seconds, kTileFlops, multiply_tiles);
    return kDotFlops == 0 ? 0.0 : flops(threads, seconds, kDotFlops, multiply_bf16);
}
}
