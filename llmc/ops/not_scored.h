#pragma once

// In place of a target: the loss of predicting this token does not count. It is 0, and has no gradient.
constexpr int not_scored = -1;
