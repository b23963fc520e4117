#include "graph.hpp"

#include <cmath>

#include "functions.hpp"

Matrix& Variable::gradient_to_add_to() {
  if (gradient.empty()) gradient = Matrix(value.rows, value.columns);
  return gradient;
}

void Variable::add_gradient(const Matrix& more) {
  Matrix& sum = gradient_to_add_to();
  for (std::size_t i = 0; i < sum.values.size(); ++i) sum.values[i] += more.values[i];
}

VariablePtr Graph::apply(std::shared_ptr<Function> function, std::vector<VariablePtr> inputs) {
  function->inputs = std::move(inputs);
  for (const VariablePtr& input : function->inputs) ++input->awaited;
  auto result = std::make_shared<Variable>(function->forward(), true);
  if (release_ == Release::in_cycles) function->result = result;
  result->creator = std::move(function);
  return result;
}

void Graph::backward(Variable& loss) {
  loss.gradient = Matrix(1, 1);
  loss.gradient.values[0] = 1;
  visit(loss);
}

// Recursively, and each variable once: when the last of its users has handed gradient back.
void Graph::visit(Variable& variable) {
  if (!variable.creator) return;
  variable.creator->backward(variable);
  for (const VariablePtr& input : variable.creator->inputs)
    if (--input->awaited == 0 && input->differentiable) visit(*input);
}

void Graph::done(VariablePtr loss) {
  if (release_ == Release::late) held_.push_back(std::move(loss));
}

Model::Model(std::vector<Matrix> parameters, float dropout, unsigned long long seed)
    : dropout_(dropout), random_(2 * seed + 0x9E3779B97F4A7C15ULL) {
  for (Matrix& one : parameters)
    parameters_.push_back(std::make_shared<Variable>(std::move(one), true));
}

VariablePtr Model::loss(Graph& graph, Matrix images, std::vector<int> labels) {
  auto h = std::make_shared<Variable>(std::move(images), false);
  for (std::size_t i = 0; i + 1 < parameters_.size(); i += 2) {
    h = graph.apply(std::make_shared<Linear>(), {h, parameters_[i], parameters_[i + 1]});
    if (i + 2 == parameters_.size()) break;
    h = graph.apply(std::make_shared<ReLU>(), {h});
    h = graph.apply(std::make_shared<Dropout>(dropout_, random_), {h});
  }
  return graph.apply(std::make_shared<SoftmaxCrossEntropy>(std::move(labels)), {h});
}

void Model::descend(float rate) {
  for (const VariablePtr& one : parameters_) {
    for (std::size_t i = 0; i < one->value.values.size(); ++i) {
      one->value.values[i] -= rate * one->gradient.values[i];
      one->gradient.values[i] = 0;
    }
  }
}

double subnormal_share(const Variable& loss) {
  long found = 0, all = 0;
  for (const Variable* at = &loss; at->creator; at = at->creator->inputs[0].get())
    for (const VariablePtr& input : at->creator->inputs)
      for (float value : input->gradient.values) {
        found += std::fpclassify(value) == FP_SUBNORMAL;
        ++all;
      }
  return all ? static_cast<double>(found) / static_cast<double>(all) : 0;
}
