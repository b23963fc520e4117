// Reverse-mode differentiation by pointers from a value to the function that made it, after the four
// classes that the source describes: variables, functions, the graph of a pass, the model.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "matrix.hpp"

class Function;

// Counts the objects of a kind that are alive.
template <class Kind>
struct Counted {
  static inline long alive = 0;
  Counted() { ++alive; }
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;
  ~Counted() { --alive; }
};

// A value, the gradient by it, and the function that made it.
class Variable : Counted<Variable> {
 public:
  Variable(Matrix value, bool differentiable)
      : value(std::move(value)), differentiable(differentiable) {}
  using Counted<Variable>::alive;

  void add_gradient(const Matrix& more);
  Matrix& gradient_to_add_to();  // zeros at first

  Matrix value, gradient;
  std::shared_ptr<Function> creator;  // null for data and parameters
  bool differentiable;
  int awaited = 0;  // users that have not handed their gradient back
};

using VariablePtr = std::shared_ptr<Variable>;

// An operator of one pass, with the variables that it was applied to.
class Function : Counted<Function> {
 public:
  using Counted<Function>::alive;
  virtual ~Function() = default;
  virtual Matrix forward() = 0;
  virtual void backward(const Variable& result) = 0;  // hands gradient to the inputs

  std::vector<VariablePtr> inputs;
  VariablePtr result;  // set only to close a cycle: function -> result -> creator
};

// When the objects of a pass are released.
enum class Release {
  at_once,    // after its batch
  late,       // all of an epoch's, after the epoch
  in_cycles,  // never: each function and its result hold each other
};

// Applies functions, and goes back through the creators of what they made.
class Graph {
 public:
  explicit Graph(Release release) : release_(release) {}

  VariablePtr apply(std::shared_ptr<Function> function, std::vector<VariablePtr> inputs);
  void backward(Variable& loss);
  void done(VariablePtr loss);  // the end of a batch: lets go of the pass, or holds it
  void epoch_done() { held_.clear(); }

 private:
  static void visit(Variable& variable);

  Release release_;
  std::vector<VariablePtr> held_;
};

// Linear, ReLU, dropout, linear, ReLU, dropout, linear, and softmax with cross entropy.
class Model {
 public:
  Model(std::vector<Matrix> parameters, float dropout, unsigned long long seed);

  VariablePtr loss(Graph& graph, Matrix images, std::vector<int> labels);
  void descend(float rate);
  const std::vector<VariablePtr>& parameters() const { return parameters_; }

 private:
  std::vector<VariablePtr> parameters_;  // weight, bias, weight, bias, ...
  float dropout_;
  unsigned long long random_;
};

// The share of subnormal numbers among the gradients of a pass.
double subnormal_share(const Variable& loss);
