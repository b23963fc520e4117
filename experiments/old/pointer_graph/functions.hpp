#pragma once

#include "graph.hpp"

// x · W + b, for inputs x, W, b.
class Linear : public Function {
 public:
  Matrix forward() override;
  void backward(const Variable& result) override;
};

class ReLU : public Function {
 public:
  Matrix forward() override;
  void backward(const Variable& result) override;
};

// Sets a share of elements to 0 and scales the others up.
class Dropout : public Function {
 public:
  Dropout(float share, unsigned long long& random) : share_(share), random_(random) {}
  Matrix forward() override;
  void backward(const Variable& result) override;

 private:
  float share_;
  unsigned long long& random_;  // the model's, which outlives the passes
  Matrix factors_;
};

// The mean cross entropy of softmax(x) and the labels.
class SoftmaxCrossEntropy : public Function {
 public:
  explicit SoftmaxCrossEntropy(std::vector<int> labels) : labels_(std::move(labels)) {}
  Matrix forward() override;
  void backward(const Variable& result) override;

 private:
  std::vector<int> labels_;
  Matrix probabilities_;
};
