//! Versions of the ONNX format and of its operators that this build reads.

/// Oldest ONNX format version that is read. Version 3 still lists weights among the inputs.
pub const MIN_IR_VERSION: i64 = 3;
/// Newest ONNX format version that is read.
pub const MAX_IR_VERSION: i64 = 14;
/// Oldest opset with operators of the meaning that rten implements. Before 13, Softmax flattens its
/// input, and its default axis is 1.
pub const MIN_OPSET: i64 = 13;
/// Newest opset that rten 0.27 implements operators of (`BitCast`, 26).
pub const MAX_OPSET: i64 = 26;
