// The update by Muon, without the iteration's matmuls, and matmuls of a batch.
#pragma once
#include <cmath>
#include <set>
#include <utility>
#include "dev/test/operations/operation.h"
#include "llmc/ops/parameter_table.h"

constexpr StepStats finite_stats = {16, 2.5};                            // the norm is 4
constexpr MuonStep muon_step = {0.05f, 0.9f, 0.1f, 2 * (1 + 1e-6 / 4)};  // gradients are clipped to a half

// Matrices as tall as wide, wider, and taller, with fewer and with more elements than a block has threads.
constexpr std::pair<int64_t, int64_t> muon_shapes[] = {{1, 1}, {3, 40}, {32, 32}, {65, 33}, {64, 128}, {2, 9000}};

// Four matrices with gaps between them; the last three are a batch. In arenas of state they have other places.
struct MuonCase {
  MuonBatch batch;
  std::vector<MuonMatrix> matrices;
  std::vector<ParameterChunk> chunks;
  int64_t size = 64, state_size = 0;  // of the arenas
  DeviceArray<MuonMatrix> d_matrices;
  DeviceArray<ParameterChunk> d_chunks;
  DeviceArray<MuonStep> d_step{std::vector<MuonStep>{muon_step}};

  MuonCase(int64_t rows, int64_t columns) : batch{1, 3, rows, columns} {
    for (int i = 0; i < 4; i++) {
      matrices.push_back({size, state_size, rows, columns});
      size += rows * columns / 64 * 64 + 128, state_size += rows * columns / 64 * 64 + 64;
    }
    append_chunks(chunks, matrices);
    d_matrices = DeviceArray<MuonMatrix>(matrices), d_chunks = DeviceArray<ParameterChunk>(chunks);
  }
  MuonArgs args() const {
    MuonArgs args = {};
    args.chunks = d_chunks.data, args.num_chunks = int64_t(d_chunks.size);
    args.matrices = d_matrices.data, args.num_matrices = int64_t(d_matrices.size);
    args.step = d_step.data;
    return args;
  }
  // Calls f(the matrix, index into it, index into the X of the batch) for each element of the batch.
  template <class F>
  void for_each(F f) const {
    for (int64_t k = 0; k < batch.count; k++)
      for (int64_t i = 0; i < batch.elements(); i++) f(size_t(batch.first + k), i, k * batch.elements() + i);
  }
};

// What muon_momentum leaves in grads, m and squares.
inline auto moved_momentum(const MuonCase& c, const std::vector<float>& grads, const std::vector<float>& m,
                           const StepStats& stats) {
  const DeviceArray<StepStats> sums(std::vector<StepStats>{stats});
  DeviceArray<float> d_grads(grads), d_m(m);
  DeviceArray<double> d_squares(std::vector<double>(4, NAN));
  MuonArgs args = c.args();
  args.grads = d_grads.data, args.m = d_m.data, args.squares = d_squares.data, args.sums = sums.data;
  muon_momentum(args);
  return std::make_tuple(d_grads.to_host(), d_m.to_host(), d_squares.to_host());
}

TEST(Muon, MomentumIsNesterovsAndEachMatrixHasItsNorm) {
  for (const auto& [rows, columns] : muon_shapes) {
    const MuonCase c(rows, columns);
    const auto grads = random_values<float>(c.size, 1), m = random_values<float>(c.state_size, 2);
    const auto [new_grads, new_m, squares] = in_any_order([&] { return moved_momentum(c, grads, m, finite_stats); }, 3);
    std::vector<double> e_grads = doubles(grads), e_m = doubles(m);
    for (const MuonMatrix& matrix : c.matrices)
      for (int64_t i = 0; i < matrix.count(); i++) {
        const double g = 0.5 * double(grads[size_t(matrix.begin + i)]);
        double& m_new = e_m[size_t(matrix.state + i)];
        m_new = 0.9 * m_new + 0.1 * g;
        e_grads[size_t(matrix.begin + i)] = 0.9 * m_new + 0.1 * g;
      }
    EXPECT_LE(relative_error(new_grads, e_grads), 2e-7);
    EXPECT_LE(relative_error(new_m, e_m), 2e-7);
    for (size_t i = 0; i < 4; i++) {
      double expected = 0;
      for (int64_t j = 0; j < c.matrices[i].count(); j++) {
        const double u = new_grads[size_t(c.matrices[i].begin + j)];
        expected += u * u;
      }
      EXPECT_NEAR(squares[i] / expected, 1, 1e-13) << rows << " x " << columns;
    }
  }
  const MuonCase c(3, 40);
  const auto grads = random_values<float>(c.size, 1), m = random_values<float>(c.state_size, 2);
  for (const StepStats& bad : {StepStats{16, NAN}, StepStats{INFINITY, 2.5}}) {
    const auto [same_grads, same_m, unused] = moved_momentum(c, grads, m, bad);
    EXPECT_TRUE(same_bits(same_grads, grads) && same_bits(same_m, m));
  }
}

TEST(Muon, Normalizes) {
  for (const auto& shape : muon_shapes) {
    const int64_t rows = shape.first, columns = shape.second;
    const MuonCase c(rows, columns);
    auto u = random_values<float>(c.size, 3);
    for (int64_t i = 0; i < c.matrices[2].count(); i++) u[size_t(c.matrices[2].begin + i)] *= 1e-7f;
    const std::vector<double> squares = {25, 16, 0, 4}, norms = {5, 4, muon_least_norm, 2};
    std::vector<double> expected(size_t(3 * rows * columns));
    c.for_each([&](size_t matrix, int64_t i, int64_t in_x) {
      expected[size_t(in_x)] = double(u[size_t(c.matrices[matrix].begin + i)]) / norms[matrix];
    });
    DeviceArray<float> d_u(u);
    const auto [x] = in_any_order(
        [&] {
          DeviceArray<floatX> d_x(nans<floatX>(int64_t(expected.size())));
          DeviceArray<double> d_squares(squares);
          MuonArgs args = c.args();
          args.grads = d_u.data, args.squares = d_squares.data;
          muon_normalize(d_x.data, args, c.batch);
          return std::make_tuple(d_x.to_host());
        },
        3);
    for (size_t k = 0; k < 3; k++) {
      const auto part = [&](const auto& all) {
        const auto begin = all.begin() + long(k) * rows * columns;
        return std::vector(begin, begin + rows * columns);
      };
      EXPECT_LE(relative_error(part(x), part(expected)), is_16_bit ? 3e-3 * coarseness : 2e-7)
          << rows << " x " << columns << ", " << k;
    }
  }
}

TEST(Muon, PolynomialHasItsConstantOnEveryDiagonal) {
  for (int64_t n : {1, 5, 40}) {
    const auto a = random_values<floatX>(3 * n * n, 1), squared = random_values<floatX>(3 * n * n, 2);
    const DeviceArray<floatX> d_a(a), d_squared(squared);
    DeviceArray<floatX> p(nans<floatX>(3 * n * n));
    muon_polynomial(p.data, d_a.data, d_squared.data, {7, 3, 2 * n, n});
    std::vector<double> expected;
    for (int64_t i = 0; i < 3 * n * n; i++)
      expected.push_back(-4.7750 * real(a[size_t(i)]) + 2.0315 * real(squared[size_t(i)]) +
                         (i % (n * n) / n == i % n ? 3.4445 : 0));
    EXPECT_LE(relative_error(p.to_host(), expected), is_16_bit ? 3e-3 * coarseness : 2e-7) << n;
  }
}

TEST(Muon, MovesWeightsByTheDirection) {
  for (const auto& shape : muon_shapes) {
    const int64_t rows = shape.first, columns = shape.second;
    const MuonCase c(rows, columns);
    const auto masters = random_values<float>(c.state_size, 1);
    std::vector<floatX> params = nans<floatX>(c.size);
    for (const MuonMatrix& matrix : c.matrices)
      std::copy_n(masters.begin() + matrix.state, matrix.count(), params.begin() + matrix.begin);
    const auto x = random_values<floatX>(3 * rows * columns, 2);
    const DeviceArray<floatX> d_x(x);
    auto moved = [&](const StepStats& stats) {
      return in_any_order(
          [&] {
            const DeviceArray<StepStats> sums(std::vector<StepStats>{stats});
            DeviceArray<float> d_masters(masters);
            DeviceArray<floatX> d_params(params);
            MuonArgs args = c.args();
            args.params = d_params.data, args.master = has_master_weights ? d_masters.data : nullptr;
            args.sums = sums.data;
            muon_update(args, d_x.data, c.batch);
            return std::make_tuple(d_masters.to_host(), d_params.to_host());
          },
          3);
    };
    const auto [new_masters, new_params] = moved(finite_stats);
    std::vector<double> expected = doubles(masters);
    c.for_each([&](size_t matrix, int64_t i, int64_t in_x) {
      double& w = expected[size_t(c.matrices[matrix].state + i)];
      w = w * (1 - 0.05 * 0.1) - 0.05 * 0.2 * std::sqrt(double(std::max(rows, columns))) * real(x[size_t(in_x)]);
    });
    std::vector<floatX> expected_params = params;
    std::vector<float> updated = new_masters;
    for (const MuonMatrix& matrix : c.matrices)
      for (int64_t i = 0; i < matrix.count(); i++) {
        if (!has_master_weights) updated[size_t(matrix.state + i)] = real(new_params[size_t(matrix.begin + i)]);
        expected_params[size_t(matrix.begin + i)] = floatX(updated[size_t(matrix.state + i)]);
      }
    EXPECT_LE(relative_error(updated, expected), 2e-7) << rows << " x " << columns;
    EXPECT_TRUE(same_bits(new_params, expected_params)) << "rounded masters, and nothing else";
    const auto [same_masters, same_params] = moved({16, NAN});
    EXPECT_TRUE(same_bits(same_masters, masters) && same_bits(same_params, params));
  }
}

TEST(Muon, BatchesAreOfOneShapeAndBoundedSize) {
  std::vector<MuonMatrix> matrices;
  const std::vector<std::pair<int64_t, int64_t>> sides = {{8, 4}, {4, 4}, {4, 8}, {4, 4},
                                                          {8, 4}, {6, 6}, {4, 8}, {4, 4}};
  for (auto [rows, columns] : sides) matrices.push_back({64 * int64_t(matrices.size()), 0, rows, columns});
  for (int64_t most_elements : {int64_t(0), 2 * muon_elements(matrices[1]), int64_t(1) << 40}) {
    std::vector<MuonMatrix> ordered = matrices;
    int64_t next = 0;
    std::vector<int64_t> counts;
    std::set<int64_t> begins;
    for (const MuonBatch& batch : make_muon_batches(ordered, most_elements)) {
      EXPECT_EQ(batch.first, next);
      next += batch.count;
      counts.push_back(batch.count);
      for (int64_t i = batch.first; i < next; i++) {
        EXPECT_EQ(ordered[size_t(i)].rows, batch.rows);
        EXPECT_EQ(ordered[size_t(i)].columns, batch.columns);
        begins.insert(ordered[size_t(i)].begin);
      }
    }
    EXPECT_EQ(begins.size(), matrices.size()) << "every matrix is in a batch, also if a division leaves some over";
    EXPECT_EQ(counts, most_elements == 0                 ? std::vector<int64_t>(8, 1)
                      : most_elements < int64_t(1) << 40 ? std::vector<int64_t>({1, 2, 1, 1, 1, 1, 1})
                                                         : std::vector<int64_t>({3, 2, 1, 2}));
  }
}

// Operands that lie closer than cuBLASLt's vectors are wide, too.
TEST(BatchedGemm, MultipliesEachPairOfMatrices) {
  for (const BatchedGemm& s : {BatchedGemm{3, 'N', 'T', 8, 8, 24},
                               {4, 'N', 'N', 5, 7, 5},
                               {1, 'T', 'N', 16, 8, 40},
                               {2, 'T', 'T', 3, 9, 4},
                               {2, 'N', 'T', 136, 136, 40, /*is_symmetric=*/true}}) {
    const auto a = random_values<floatX>(s.batch * s.m * s.k, 1),
               b = s.is_symmetric ? a : random_values<floatX>(s.batch * s.k * s.n, 2);
    std::vector<double> expected;
    for (int64_t i = 0; i < s.batch; i++)
      for (int64_t row = 0; row < s.m; row++)
        for (int64_t column = 0; column < s.n; column++) {
          double sum = 0;
          for (int64_t l = 0; l < s.k; l++)
            sum += real(a[size_t(i * s.m * s.k + (s.op_a == 'N' ? row * s.k + l : l * s.m + row))]) *
                   real(b[size_t(i * s.k * s.n + (s.op_b == 'N' ? l * s.n + column : column * s.k + l))]);
          expected.push_back(sum);
        }
    const DeviceArray<floatX> d_a(a), d_b(b);
    DeviceArray<floatX> c(nans<floatX>(int64_t(expected.size())));
    gemm(s, d_a.data, d_b.data, c.data);
    EXPECT_LE(relative_error(c.to_host(), expected), one_rounding) << s.op_a << s.op_b;
  }
}
