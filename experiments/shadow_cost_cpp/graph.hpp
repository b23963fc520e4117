// Reverse-mode differentiation by pointers from a value to the function that made it, after the four
// classes that the paper describes: variables, functions, the graph of a pass, the model.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "matrix.hpp"

// Counts the objects that are alive.
struct Counted {
  static inline long alive = 0;
  Counted() { ++alive; }
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;
  ~Counted() { --alive; }
};

struct Function;

// A value, the gradient by it, and the function that made it (null for data and parameters).
struct Variable : Counted {
  Variable(Matrix value, bool differentiable)
      : value(std::move(value)), differentiable(differentiable) {}

  Matrix& gradient_to_add_to() {  // zeros at first
    if (gradient.values.empty()) gradient = Matrix(value.rows, value.columns);
    return gradient;
  }
  void add_gradient(const Matrix& more) {
    Matrix& sum = gradient_to_add_to();
    for (std::size_t i = 0; i < sum.values.size(); ++i) sum.values[i] += more.values[i];
  }

  Matrix value, gradient;
  std::shared_ptr<Function> creator;
  bool differentiable;
  int awaited = 0;  // users that have not handed their gradient back
};

using VariablePtr = std::shared_ptr<Variable>;

// An operator of one pass, with the variables that it was applied to.
struct Function : Counted {
  virtual ~Function() = default;
  virtual Matrix forward() = 0;
  virtual void backward(const Variable& result) = 0;  // hands gradient to the inputs

  std::vector<VariablePtr> inputs;
  VariablePtr result;  // set only to close a cycle: function -> result -> creator
};

// x · W + b, for inputs x, W, b.
struct Linear : Function {
  Matrix forward() override {
    const Matrix &x = inputs[0]->value, &weight = inputs[1]->value, &bias = inputs[2]->value;
    Matrix y(x.rows, weight.columns);
    for (std::size_t i = 0; i < y.rows; ++i)
      std::copy(bias.values.begin(), bias.values.end(), y.row(i));
    add_product(x, weight, y);
    return y;
  }
  void backward(const Variable& result) override {
    const Matrix& g = result.gradient;
    if (inputs[0]->differentiable)
      add_product(g, transposed(inputs[1]->value), inputs[0]->gradient_to_add_to());
    add_transposed_product(inputs[0]->value, g, inputs[1]->gradient_to_add_to());
    Matrix& bias = inputs[2]->gradient_to_add_to();
    for (std::size_t i = 0; i < g.rows; ++i)
      for (std::size_t j = 0; j < g.columns; ++j) bias.values[j] += g.row(i)[j];
  }
};

struct ReLU : Function {
  Matrix forward() override {
    Matrix y = inputs[0]->value;
    for (float& value : y.values) value = std::max(value, 0.0f);
    return y;
  }
  void backward(const Variable& result) override {
    Matrix g = result.gradient;
    for (std::size_t i = 0; i < g.values.size(); ++i)
      g.values[i] = result.value.values[i] > 0 ? g.values[i] : 0.0f;
    inputs[0]->add_gradient(g);
  }
};

// Uniform in [0, 1), by xorshift64*.
inline float uniform(unsigned long long& state) {
  state ^= state >> 12;
  state ^= state << 25;
  state ^= state >> 27;
  return static_cast<float>((state * 0x2545F4914F6CDD1DULL) >> 40) / static_cast<float>(1 << 24);
}

// Sets a share of elements to 0 and scales the others up.
struct Dropout : Function {
  Dropout(float share, unsigned long long& random) : share(share), random(random) {}
  Matrix forward() override {
    Matrix y = inputs[0]->value;
    factors = Matrix(y.rows, y.columns);
    for (std::size_t i = 0; i < y.values.size(); ++i) {
      factors.values[i] = uniform(random) < share ? 0.0f : 1 / (1 - share);
      y.values[i] *= factors.values[i];
    }
    return y;
  }
  void backward(const Variable& result) override {
    Matrix g = result.gradient;
    for (std::size_t i = 0; i < g.values.size(); ++i) g.values[i] *= factors.values[i];
    inputs[0]->add_gradient(g);
  }

  float share;
  unsigned long long& random;  // the model's, which outlives the passes
  Matrix factors;
};

// The mean cross entropy of softmax(x) and the labels.
struct SoftmaxCrossEntropy : Function {
  explicit SoftmaxCrossEntropy(std::vector<int> labels) : labels(std::move(labels)) {}
  Matrix forward() override {
    probabilities = inputs[0]->value;
    Matrix loss(1, 1);
    for (std::size_t i = 0; i < probabilities.rows; ++i) {
      float *p = probabilities.row(i), *end = p + probabilities.columns;
      const float largest = *std::max_element(p, end), score = p[labels[i]] - largest;
      float sum = 0;
      for (float* at = p; at < end; ++at) sum += *at = std::exp(*at - largest);
      for (float* at = p; at < end; ++at) *at /= sum;
      loss.values[0] += (std::log(sum) - score) / static_cast<float>(probabilities.rows);
    }
    return loss;
  }
  void backward(const Variable& result) override {
    Matrix g = probabilities;
    const float scale = result.gradient.values[0] / static_cast<float>(g.rows);
    for (std::size_t i = 0; i < g.rows; ++i) g.row(i)[labels[i]] -= 1;
    for (float& value : g.values) value *= scale;
    inputs[0]->add_gradient(g);
  }

  std::vector<int> labels;
  Matrix probabilities;
};

// When the objects of a pass are released: after its batch; all of an epoch's, after the epoch; or
// never, since each function and its result hold each other.
enum class Release { at_once, late, in_cycles };

// Applies functions, and goes back through the creators of what they made.
struct Graph {
  VariablePtr apply(std::shared_ptr<Function> function, std::vector<VariablePtr> inputs) {
    function->inputs = std::move(inputs);
    for (const VariablePtr& input : function->inputs) ++input->awaited;
    auto result = std::make_shared<Variable>(function->forward(), true);
    if (release == Release::in_cycles) function->result = result;
    result->creator = std::move(function);
    return result;
  }
  void backward(Variable& loss) {
    loss.gradient = Matrix(1, 1);
    loss.gradient.values[0] = 1;
    visit(loss);
  }
  // Recursively, and each variable once: when the last of its users has handed gradient back.
  static void visit(Variable& variable) {
    if (!variable.creator) return;
    variable.creator->backward(variable);
    for (const VariablePtr& input : variable.creator->inputs)
      if (--input->awaited == 0 && input->differentiable) visit(*input);
  }
  void done(VariablePtr loss, bool last) {  // the end of a batch: lets go of the pass, or holds it
    if (release == Release::late) held.push_back(std::move(loss));
    if (last) held.clear();
  }

  Release release;
  std::vector<VariablePtr> held;
};

// Linear, ReLU, dropout, linear, ReLU, dropout, linear, and softmax with cross entropy.
struct Model {
  VariablePtr loss(Graph& graph, Matrix images, std::vector<int> labels) {
    auto h = std::make_shared<Variable>(std::move(images), false);
    for (std::size_t i = 0; i < parameters.size(); i += 2) {
      h = graph.apply(std::make_shared<Linear>(), {h, parameters[i], parameters[i + 1]});
      if (i + 2 == parameters.size()) break;
      h = graph.apply(std::make_shared<ReLU>(), {h});
      h = graph.apply(std::make_shared<Dropout>(dropout, random), {h});
    }
    return graph.apply(std::make_shared<SoftmaxCrossEntropy>(std::move(labels)), {h});
  }
  void descend(float rate) {
    for (const VariablePtr& one : parameters)
      for (std::size_t i = 0; i < one->value.values.size(); ++i) {
        one->value.values[i] -= rate * one->gradient.values[i];
        one->gradient.values[i] = 0;
      }
  }

  float dropout;
  unsigned long long random;
  std::vector<VariablePtr> parameters = {};  // weight, bias, weight, bias, ...
};
