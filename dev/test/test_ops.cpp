// Each CPU operation alone, against its formula in double.
#include <gtest/gtest.h>           // TEST
#include <cmath>                   // exp, log, sqrt, tanh
#include <functional>              // std::function
#include <limits>                  // std::numeric_limits
#include <vector>                  // std::vector
#include "llmc/cpu/attention.h"    // attention_forward, attention_backward
#include "llmc/cpu/classifier.h"   // classifier
#include "llmc/cpu/embedding.h"    // embedding_forward, embedding_backward
#include "llmc/cpu/gelu.h"         // gelu_forward, gelu_backward
#include "llmc/cpu/layernorm.h"    // layernorm_forward, layernorm_backward
#include "llmc/cpu/matmul.h"       // matmul_forward, matmul_backward
#include "llmc/cpu/optimizer.h"    // adamw_update, sum_of_squares
#include "llmc/random.h"           // random_normal

static std::vector<float> random_floats(int64_t n, uint32_t tag, double scale = 1) {
  std::vector<float> x(size_t(n), 0.0f);
  for (size_t i = 0; i < x.size(); i++) x[i] = float(scale * random_normal(1, RandomStream::test, tag, i));
  return x;
}

static double relative_error(const std::vector<float>& a, const std::vector<double>& expected) {
  EXPECT_EQ(a.size(), expected.size());
  double difference = 0, norm = 0;
  for (size_t i = 0; i < a.size(); i++) {
    difference += (a[i] - expected[i]) * (a[i] - expected[i]);
    norm += expected[i] * expected[i];
  }
  return std::sqrt(difference / norm);
}

TEST(Exp, IsWithinAFewRoundingErrorsAndKeepsItsLimits) {
  double worst = 0;
  for (double x = -87; x < 88.5; x += 0.00173) worst = std::max(worst, std::abs(vec_exp(float(x)) / std::exp(double(float(x))) - 1));
  EXPECT_LE(worst, 3e-7);
  EXPECT_EQ(vec_exp(0.0f), 1.0f);
  EXPECT_EQ(vec_exp(-100.0f), 0.0f);
  EXPECT_EQ(vec_exp(-std::numeric_limits<float>::infinity()), 0.0f);
  EXPECT_EQ(vec_exp(100.0f), std::numeric_limits<float>::infinity());
  EXPECT_TRUE(std::isnan(vec_exp(std::numeric_limits<float>::quiet_NaN())));
}

TEST(Matmul, ForwardIsInpTimesWeightTransposedPlusBias) {
  const int64_t N = 37, C = 19, OC = 23;
  const auto inp = random_floats(N * C, 1), weight = random_floats(OC * C, 2), bias = random_floats(OC, 3);
  for (bool with_bias : {false, true}) {
    std::vector<float> out(N * OC, std::numeric_limits<float>::quiet_NaN());
    matmul_forward(out.data(), inp.data(), weight.data(), with_bias ? bias.data() : nullptr, N, C, OC);
    std::vector<double> expected(N * OC);
    for (int64_t n = 0; n < N; n++)
      for (int64_t o = 0; o < OC; o++) {
        double sum = with_bias ? bias[o] : 0;
        for (int64_t i = 0; i < C; i++) sum += double(inp[n * C + i]) * weight[o * C + i];
        expected[n * OC + o] = sum;
      }
    EXPECT_LE(relative_error(out, expected), 1e-6);
  }
}

TEST(Matmul, BackwardSetsTheInputsGradientAndAddsToTheWeights) {
  const int64_t N = 37, C = 19, OC = 131;  // OC beyond the column width of bias_backward
  const auto inp = random_floats(N * C, 1), weight = random_floats(OC * C, 2), dout = random_floats(N * OC, 3);
  std::vector<float> dinp(N * C, std::numeric_limits<float>::quiet_NaN());
  std::vector<float> dweight = random_floats(OC * C, 4), dbias = random_floats(OC, 5);
  std::vector<double> e_dinp(N * C), e_dweight(dweight.begin(), dweight.end()), e_dbias(dbias.begin(), dbias.end());
  for (int64_t n = 0; n < N; n++)
    for (int64_t o = 0; o < OC; o++) {
      e_dbias[o] += dout[n * OC + o];
      for (int64_t i = 0; i < C; i++) {
        e_dinp[n * C + i] += double(dout[n * OC + o]) * weight[o * C + i];
        e_dweight[o * C + i] += double(dout[n * OC + o]) * inp[n * C + i];
      }
    }
  matmul_backward(dinp.data(), dweight.data(), dbias.data(), dout.data(), inp.data(), weight.data(), N, C, OC);
  EXPECT_LE(relative_error(dinp, e_dinp), 1e-6);
  EXPECT_LE(relative_error(dweight, e_dweight), 1e-6);
  EXPECT_LE(relative_error(dbias, e_dbias), 1e-6);
}

TEST(LayerNorm, ForwardAndBackwardFollowTheFormula) {
  const int64_t N = 131, C = 45;  // rows beyond one block of partial sums
  const auto a = random_floats(N * C, 1, 3), b = random_floats(N * C, 2), weight = random_floats(C, 3), bias = random_floats(C, 4);
  const auto dout = random_floats(N * C, 5);
  std::vector<float> residual(N * C), out(N * C), mean(N), rstd(N);
  residual_layernorm_forward(residual.data(), out.data(), mean.data(), rstd.data(), a.data(), b.data(), weight.data(),
                             bias.data(), N, C, 1e-5f);
  std::vector<float> again(N * C), mean2(N), rstd2(N);
  layernorm_forward(again.data(), mean2.data(), rstd2.data(), residual.data(), weight.data(), bias.data(), N, C, 1e-5f);
  EXPECT_EQ(out, again);

  std::vector<float> dinp = random_floats(N * C, 6), dweight = random_floats(C, 7), dbias = random_floats(C, 8);
  std::vector<double> e_out(N * C), e_dinp(dinp.begin(), dinp.end()), e_dweight(dweight.begin(), dweight.end());
  std::vector<double> e_dbias(dbias.begin(), dbias.end());
  for (int64_t n = 0; n < N; n++) {
    double m = 0, var = 0, g_mean = 0, gx_mean = 0;
    std::vector<double> x(C), xhat(C);
    for (int64_t i = 0; i < C; i++) x[i] = double(a[n * C + i]) + b[n * C + i], m += x[i] / C;
    for (int64_t i = 0; i < C; i++) var += (x[i] - m) * (x[i] - m) / C;
    for (int64_t i = 0; i < C; i++) {
      xhat[i] = (x[i] - m) / std::sqrt(var + 1e-5);
      e_out[n * C + i] = xhat[i] * weight[i] + bias[i];
      double g = double(dout[n * C + i]) * weight[i];
      g_mean += g / C, gx_mean += g * xhat[i] / C;
      e_dweight[i] += dout[n * C + i] * xhat[i];
      e_dbias[i] += dout[n * C + i];
    }
    for (int64_t i = 0; i < C; i++)
      e_dinp[n * C + i] += (double(dout[n * C + i]) * weight[i] - g_mean - xhat[i] * gx_mean) / std::sqrt(var + 1e-5);
  }
  layernorm_backward(dinp.data(), dweight.data(), dbias.data(), dout.data(), residual.data(), mean.data(), rstd.data(),
                     weight.data(), N, C);
  EXPECT_LE(relative_error(out, e_out), 1e-6);
  EXPECT_LE(relative_error(dinp, e_dinp), 1e-6);
  EXPECT_LE(relative_error(dweight, e_dweight), 1e-6);
  EXPECT_LE(relative_error(dbias, e_dbias), 1e-6);
}

TEST(Gelu, AndItsDerivativeAreTheTanhForm) {
  std::vector<float> x, d;
  for (float v = -12; v < 12; v += 0.01f) x.push_back(v), d.push_back(1.5f);
  std::vector<float> y(x.size());
  gelu_forward(y.data(), x.data(), int64_t(x.size()));
  gelu_backward(d.data(), x.data(), int64_t(x.size()));
  for (size_t i = 0; i < x.size(); i++) {
    const double v = x[i], k = std::sqrt(2 / M_PI), t = std::tanh(k * (v + 0.044715 * v * v * v));
    EXPECT_NEAR(y[i], 0.5 * v * (1 + t), 1e-6 * std::max(1.0, std::abs(v))) << v;
    EXPECT_NEAR(d[i], 1.5 * (0.5 * (1 + t) + 0.5 * v * (1 - t * t) * k * (1 + 3 * 0.044715 * v * v)), 2e-6) << v;
  }
}

TEST(Classifier, GivesTheCrossEntropyAndItsGradientEvenForHugeLogits) {
  const int64_t rows = 5, V = 37, ld = 64;
  for (double scale : {1.0, 1e4}) {
    auto logits = random_floats(rows * ld, 1, scale);
    const int targets[] = {0, 36, 5, 5, 20};
    std::vector<double> e_losses(rows), e_gradient(rows * V);
    for (int64_t n = 0; n < rows; n++) {
      double max = logits[n * ld], sum = 0;
      for (int64_t i = 0; i < V; i++) max = std::max(max, double(logits[n * ld + i]));
      for (int64_t i = 0; i < V; i++) sum += std::exp(logits[n * ld + i] - max);
      e_losses[n] = std::log(sum) + max - logits[n * ld + targets[n]];
      for (int64_t i = 0; i < V; i++)
        e_gradient[n * V + i] = 0.25 * (std::exp(logits[n * ld + i] - max) / sum - (i == targets[n]));
    }
    std::vector<float> losses(rows), losses_only(rows), gradient;
    auto copy = logits;
    classifier(losses_only.data(), copy.data(), targets, rows, V, ld, 0.25f, false);
    EXPECT_EQ(copy, logits) << "without a gradient the logits stay";
    classifier(losses.data(), logits.data(), targets, rows, V, ld, 0.25f, true);
    for (int64_t n = 0; n < rows; n++) {
      gradient.insert(gradient.end(), &logits[n * ld], &logits[n * ld + V]);
      for (int64_t i = V; i < ld; i++) EXPECT_EQ(logits[n * ld + i], copy[n * ld + i]) << "padding is nobody's";
    }
    EXPECT_EQ(losses, losses_only);
    EXPECT_LE(relative_error(losses, e_losses), 1e-6);
    EXPECT_LE(relative_error(gradient, e_gradient), 2e-6);
  }
}

TEST(Embedding, AddsTokensAndPositionsAndCollectsRepeatedTokens) {
  const int64_t B = 2, T = 5, C = 67, V = 4;
  const int tokens[] = {0, 1, 1, 3, 1, 3, 3, 0, 1, 1};
  const auto wte = random_floats(V * C, 1), wpe = random_floats(9 * C, 2), dout = random_floats(B * T * C, 3);
  std::vector<float> out(B * T * C), dwte = random_floats(V * C, 4), dwpe = random_floats(9 * C, 5);
  std::vector<double> e_out(B * T * C), e_dwte(dwte.begin(), dwte.end()), e_dwpe(dwpe.begin(), dwpe.end());
  for (int64_t n = 0; n < B * T; n++)
    for (int64_t i = 0; i < C; i++) {
      e_out[n * C + i] = double(wte[tokens[n] * C + i]) + wpe[(n % T + 2) * C + i];
      e_dwte[tokens[n] * C + i] += dout[n * C + i];
      e_dwpe[n % T * C + i] += dout[n * C + i];
    }
  embedding_forward(out.data(), tokens, wte.data(), wpe.data(), B, T, C, 2);
  embedding_backward(dwte.data(), dwpe.data(), dout.data(), tokens, B, T, C);
  EXPECT_LE(relative_error(out, e_out), 1e-6);
  EXPECT_LE(relative_error(dwte, e_dwte), 1e-6);
  EXPECT_LE(relative_error(dwpe, e_dwpe), 1e-6);
}

TEST(AdamW, MovesAsPyTorchDoes) {
  // One element by hand, in double.
  const double lr = 0.01, b1 = 0.9, b2 = 0.95, eps = 1e-8, decay = 0.1, scale = 0.5;
  double p = 0.7, m = 0.02, v = 0.003;
  const double g = -0.3 * scale;
  std::vector<float> fp(100, float(p)), fm(100, float(m)), fv(100, float(v)), fg(100, -0.3f);
  p *= 1 - lr * decay;
  m = b1 * m + (1 - b1) * g;
  v = b2 * v + (1 - b2) * g * g;
  p -= lr / (1 - std::pow(b1, 3)) * m / (std::sqrt(v) / std::sqrt(1 - std::pow(b2, 3)) + eps);
  adamw_update(fp.data(), fm.data(), fv.data(), fg.data(), 100, float(decay),
               {float(lr), float(b1), float(b2), float(eps), float(1 - std::pow(b1, 3)), float(1 - std::pow(b2, 3)), float(scale)});
  for (int i : {0, 57, 99}) {
    EXPECT_NEAR(fp[i], p, 1e-7);
    EXPECT_NEAR(fm[i], m, 1e-8);
    EXPECT_NEAR(fv[i], v, 1e-9);
    EXPECT_EQ(fg[i], -0.3f) << "the gradient stays";
  }
}

TEST(SumOfSquares, IsExactWhereFloatWouldNotBe) {
  std::vector<float> x(200000, 1.0f);  // beyond one block
  x[77] = 30000.0f;
  EXPECT_EQ(sum_of_squares(x.data(), int64_t(x.size())), 199999.0 + 9e8);
}

// ----------------------------------------------------------------------------
// Attention

struct AttentionCase {
  int64_t B, T, NH, HS;
  double scale;              // of q and k: 1 gives ordinary scores
  std::vector<int> pair_of;  // (NH): which pair each head reads
};

// Everything a table can ask for: pairs with strides of their own, several heads reading one pair, gradients that are set and
// gradients that are added to.
static void check_attention(const AttentionCase& c) {
  const int64_t pairs = 1 + *std::max_element(c.pair_of.begin(), c.pair_of.end());
  const int64_t rows = c.B * c.T, C = c.NH * c.HS, q_stride = C + 3;
  const auto q = random_floats(rows * q_stride, 1, c.scale), dout = random_floats(rows * C, 2);
  std::vector<std::vector<float>> kv, dkv;
  std::vector<int64_t> stride;
  AttentionTable<float> table;
  for (int64_t p = 0; p < pairs; p++) {
    stride.push_back(2 * c.HS + p);
    kv.push_back(random_floats(rows * stride[p], uint32_t(10 + p)));
    for (int64_t n = 0; n < rows; n++)
      for (int64_t i = 0; i < c.HS; i++) kv[p][n * stride[p] + i] *= float(c.scale);  // k; v stays ordinary
    dkv.push_back(random_floats(rows * stride[p], uint32_t(20 + p)));
  }
  for (int64_t p = 0; p < pairs; p++) {
    const int first = int(table.readers.size());
    for (int i = 0; i < int(c.NH); i++)
      if (c.pair_of[i] == p) table.readers.push_back(i);
    table.views.push_back({kv[p].data(), kv[p].data() + c.HS, stride[p], dkv[p].data(), dkv[p].data() + c.HS, stride[p],
                           /*accumulate=*/p % 2 == 1, first, int(table.readers.size()) - first});
  }

  std::vector<double> e_out(rows * C), e_lse(c.B * c.NH * c.T), e_dq(rows * C);
  std::vector<std::vector<double>> e_dkv;
  for (int64_t p = 0; p < pairs; p++) {
    e_dkv.emplace_back(dkv[p].begin(), dkv[p].end());
    for (int64_t n = 0; n < rows && p % 2 == 0; n++) std::fill_n(&e_dkv[p][n * stride[p]], 2 * c.HS, 0.0);
  }
  for (int64_t b = 0; b < c.B; b++)
    for (int64_t head = 0; head < c.NH; head++) {
      const int64_t p = c.pair_of[head];
      for (int64_t t = 0; t < c.T; t++) {
        const int64_t n = b * c.T + t;
        std::vector<double> prob(t + 1), dprob(t + 1);
        double max = -1e300, sum = 0, delta = 0;
        for (int64_t j = 0; j <= t; j++) {
          for (int64_t i = 0; i < c.HS; i++)
            prob[j] += double(q[n * q_stride + head * c.HS + i]) * kv[p][(b * c.T + j) * stride[p] + i] / std::sqrt(double(c.HS));
          max = std::max(max, prob[j]);
        }
        for (double& s : prob) s = std::exp(s - max), sum += s;
        e_lse[(b * c.NH + head) * c.T + t] = max + std::log(sum);
        for (double& s : prob) s /= sum;
        for (int64_t j = 0; j <= t; j++)
          for (int64_t i = 0; i < c.HS; i++) {
            e_out[n * C + head * c.HS + i] += prob[j] * kv[p][(b * c.T + j) * stride[p] + c.HS + i];
            dprob[j] += double(dout[n * C + head * c.HS + i]) * kv[p][(b * c.T + j) * stride[p] + c.HS + i];
          }
        for (int64_t j = 0; j <= t; j++) delta += prob[j] * dprob[j];
        for (int64_t j = 0; j <= t; j++) {
          const double ds = prob[j] * (dprob[j] - delta) / std::sqrt(double(c.HS));
          for (int64_t i = 0; i < c.HS; i++) {
            e_dq[n * C + head * c.HS + i] += ds * kv[p][(b * c.T + j) * stride[p] + i];
            e_dkv[p][(b * c.T + j) * stride[p] + i] += ds * q[n * q_stride + head * c.HS + i];
            e_dkv[p][(b * c.T + j) * stride[p] + c.HS + i] += prob[j] * dout[n * C + head * c.HS + i];
          }
        }
      }
    }

  const float nan = std::numeric_limits<float>::quiet_NaN();
  const AttentionShape shape = {c.B, c.T, c.NH, c.HS, 0};
  std::vector<float> out(rows * C, nan), lse(c.B * c.NH * c.T, nan), dq(rows * C, nan);
  attention_forward(out.data(), lse.data(), q.data(), q_stride, table, shape);
  EXPECT_LE(relative_error(out, e_out), 2e-6 * c.scale);
  EXPECT_LE(relative_error(lse, e_lse), 1e-6);
  attention_backward(dq.data(), C, dout.data(), out.data(), lse.data(), q.data(), q_stride, table, shape);
  if (c.T > 1) {  // a lone position has no gradient of q
    EXPECT_LE(relative_error(dq, e_dq), 1e-5 * c.scale);
  }
  for (int64_t p = 0; p < pairs; p++) EXPECT_LE(relative_error(dkv[p], e_dkv[p]), 1e-5 * c.scale) << "pair " << p;
}

TEST(Attention, OfSeveralLengthsIsTheSoftmaxFormulaWithItsGradients) {
  for (int64_t T : {1, 7, 63, 64, 65, 128, 255, 256, 257, 300}) {
    SCOPED_TRACE(T);
    check_attention({2, T, 2, 8, 1, {0, 1}});
  }
}

TEST(Attention, TakesAnyHeadSize) {
  for (int64_t HS : {1, 5, 32, 64, 80, 128}) {
    SCOPED_TRACE(HS);
    check_attention({1, 70, 2, HS, 1, {0, 1}});
  }
}

TEST(Attention, SharesAPairAmongHeads) {
  check_attention({2, 70, 4, 8, 1, {0, 0, 1, 1}});
  check_attention({2, 70, 3, 8, 1, {0, 0, 0}});
  check_attention({1, 70, 4, 8, 1, {2, 0, 1, 0}});
}

TEST(Attention, StaysFiniteAndRightForHugeScores) { check_attention({1, 130, 2, 16, 30, {0, 1}}); }
