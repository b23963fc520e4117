// Elementwise, index and reduction steps: value and mark in one pass over memory.
#include "threads.h"
