// One product Y = X * W on two ranks, four ways: which numbers a rank has, and which bytes it sends.
// tessera run -n 2 -- ./08_one_product
#include <array>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "tessera/comm/init.h"

using namespace tessera;
using Matrix = std::vector<float>;  // by rows

namespace {

const Matrix kX = {1, 2, 3, 4, 5, 6}, kW = {1, 2, 3, 4, 5, 6};  // 2 x 3 and 3 x 2
const Matrix kGradient = {1, 1, 1, 1};                          // of Y, from the loss

/// a (rows x inner) times b (inner x columns).
Matrix product(const Matrix& a, const Matrix& b, std::size_t inner) {
  const std::size_t rows = a.size() / inner, columns = b.size() / inner;
  Matrix c(rows * columns, 0);
  for (std::size_t i = 0; i < rows; ++i)
    for (std::size_t k = 0; k < inner; ++k)
      for (std::size_t j = 0; j < columns; ++j) c[i * columns + j] += a[i * inner + k] * b[k * columns + j];
  return c;
}

comm::View all(Matrix& m) { return comm::view_of(m.data(), m.size()); }
comm::ConstView in(const Matrix& m) { return comm::view_of(m.data(), m.size()); }

/// Prints what a rank sent, and every rank's part of Y in rank order.
void report(comm::Communicator& world, const char* way, std::array<std::uint64_t, 3> sent, Matrix y) {
  y.resize(4, 0);  // ranks have two numbers of it, or four
  Matrix parts(4 * static_cast<std::size_t>(world.size()));
  std::array<double, 2> mine = {static_cast<double>(sent[1] - sent[0]), static_cast<double>(sent[2] - sent[1])};
  const auto most = comm::view_of(mine.data(), 2);
  world.all_gather(in(y), all(parts)).wait();
  world.all_reduce(most, most, comm::ReduceOp::max()).wait();
  if (world.rank() == 0)
    std::printf("%-9s forward %2.0f B, backward %2.0f B   rank 0 has %2g %2g, rank 1 %2g %2g\n", way, mine[0], mine[1],
                parts[0], parts[1], parts[4], parts[5]);
}

}  // namespace

int main() {
  const auto world = comm::init();
  if (world->size() != 2) return std::fprintf(stderr, "two ranks, please: tessera run -n 2\n"), 2;
  const auto r = static_cast<std::size_t>(world->rank());
  const auto sent = [&] { return world->traffic().bytes_sent(); };
  const Matrix x(kX.begin() + 3 * r, kX.begin() + 3 * (r + 1));        // row r of X
  const Matrix w_shard(kW.begin() + 3 * r, kW.begin() + 3 * (r + 1));  // half of W's numbers
  const Matrix w_column = {kW[r], kW[2 + r], kW[4 + r]};               // column r of W
  const Matrix g_row = {kGradient[2 * r], kGradient[2 * r + 1]}, g_column = {kGradient[r], kGradient[2 + r]};

  auto t0 = sent();  // data parallel: its row of X, all of W
  Matrix y = product(x, kW, 3);
  auto t1 = sent();
  Matrix w_gradient = product(x, g_row, 1);
  world->all_reduce(all(w_gradient), all(w_gradient), comm::ReduceOp::sum()).wait();
  report(*world, "data", {t0, t1, sent()}, y);

  t0 = sent();  // FSDP: its row of X, 3 of W's 6 numbers; the others come when they are needed
  Matrix w(6), gradient_shard(3);
  world->all_gather(in(w_shard), all(w)).wait();
  y = product(x, w, 3);
  t1 = sent();
  world->all_gather(in(w_shard), all(w)).wait();  // again: it was resharded, and X's gradient needs it
  w_gradient = product(x, g_row, 1);
  world->reduce_scatter(in(w_gradient), all(gradient_shard), comm::ReduceOp::sum()).wait();
  report(*world, "fsdp", {t0, t1, sent()}, y);

  t0 = sent();  // tensor parallel: all of X, a column of W
  const Matrix column = product(kX, w_column, 3);
  Matrix columns(4);
  world->all_gather(in(column), all(columns)).wait();
  t1 = sent();
  Matrix x_gradient = product(g_column, w_column, 1);  // of one column; the sum over the ranks is that of X
  world->all_reduce(all(x_gradient), all(x_gradient), comm::ReduceOp::sum()).wait();
  report(*world, "tensor", {t0, t1, sent()}, column);

  t0 = sent();  // pipeline: rank 0 has this layer, rank 1 the next one
  Matrix whole = r == 0 ? product(kX, kW, 3) : Matrix(4);
  (r == 0 ? world->send(in(whole), 1) : world->recv(all(whole), 0)).wait();
  t1 = sent();
  Matrix back = r == 0 ? Matrix(4) : kGradient;
  (r == 0 ? world->recv(all(back), 1) : world->send(in(back), 0)).wait();
  report(*world, "pipeline", {t0, t1, sent()}, whole);
}
