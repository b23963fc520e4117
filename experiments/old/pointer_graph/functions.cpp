#include "functions.hpp"

#include <algorithm>
#include <cmath>

namespace {

// xorshift64*: uniform in [0, 1)
float uniform(unsigned long long& state) {
  state ^= state >> 12;
  state ^= state << 25;
  state ^= state >> 27;
  return static_cast<float>((state * 0x2545F4914F6CDD1DULL) >> 40) / static_cast<float>(1 << 24);
}

}  // namespace

Matrix Linear::forward() {
  const Matrix &x = inputs[0]->value, &weight = inputs[1]->value, &bias = inputs[2]->value;
  Matrix y(x.rows, weight.columns);
  for (std::size_t i = 0; i < y.rows; ++i)
    std::copy(bias.values.begin(), bias.values.end(), y.row(i));
  add_product(x, weight, y);
  return y;
}

void Linear::backward(const Variable& result) {
  const Matrix& g = result.gradient;
  if (inputs[0]->differentiable)
    add_product(g, transposed(inputs[1]->value), inputs[0]->gradient_to_add_to());
  add_transposed_product(inputs[0]->value, g, inputs[1]->gradient_to_add_to());
  Matrix& bias = inputs[2]->gradient_to_add_to();
  for (std::size_t i = 0; i < g.rows; ++i)
    for (std::size_t j = 0; j < g.columns; ++j) bias.values[j] += g.row(i)[j];
}

Matrix ReLU::forward() {
  Matrix y = inputs[0]->value;
  for (float& value : y.values) value = std::max(value, 0.0f);
  return y;
}

void ReLU::backward(const Variable& result) {
  Matrix g = result.gradient;
  for (std::size_t i = 0; i < g.values.size(); ++i)
    g.values[i] = result.value.values[i] > 0 ? g.values[i] : 0.0f;
  inputs[0]->add_gradient(g);
}

Matrix Dropout::forward() {
  Matrix y = inputs[0]->value;
  factors_ = Matrix(y.rows, y.columns);
  for (std::size_t i = 0; i < y.values.size(); ++i) {
    factors_.values[i] = uniform(random_) < share_ ? 0.0f : 1 / (1 - share_);
    y.values[i] *= factors_.values[i];
  }
  return y;
}

void Dropout::backward(const Variable& result) {
  Matrix g = result.gradient;
  for (std::size_t i = 0; i < g.values.size(); ++i) g.values[i] *= factors_.values[i];
  inputs[0]->add_gradient(g);
}

Matrix SoftmaxCrossEntropy::forward() {
  probabilities_ = inputs[0]->value;
  Matrix loss(1, 1);
  for (std::size_t i = 0; i < probabilities_.rows; ++i) {
    float* p = probabilities_.row(i);
    const std::size_t classes = probabilities_.columns;
    const float largest = *std::max_element(p, p + classes);
    float sum = 0;
    for (std::size_t j = 0; j < classes; ++j) sum += p[j] = std::exp(p[j] - largest);
    const float score = inputs[0]->value.row(i)[labels_[i]] - largest;
    loss.values[0] += (std::log(sum) - score) / static_cast<float>(probabilities_.rows);
    for (std::size_t j = 0; j < classes; ++j) p[j] /= sum;
  }
  return loss;
}

void SoftmaxCrossEntropy::backward(const Variable& result) {
  Matrix g = probabilities_;
  const float scale = result.gradient.values[0] / static_cast<float>(g.rows);
  for (std::size_t i = 0; i < g.rows; ++i) g.row(i)[labels_[i]] -= 1;
  for (float& value : g.values) value *= scale;
  inputs[0]->add_gradient(g);
}
