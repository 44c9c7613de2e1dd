#include "attention/attend.cpp"
