//! The operators that run: the operators that rten 0.27 registers, and `Constant`, which its loader
//! folds. A test compares this table with rten. The table lacks the operators behind rten's `fft` and
//! `random` features (`Dropout`, `DFT`, `RandomNormal`, ...), because this build has these features
//! off.

/// The supported operators of ONNX's own domain, sorted.
#[rustfmt::skip]
pub const ONNX: &[&str] = &[
    "Abs", "Acos", "Acosh", "Add", "And", "ArgMax", "ArgMin", "Asin", "Asinh", "Atan", "Atanh",
    "Attention", "AveragePool", "BatchNormalization", "BitCast", "Cast", "CastLike", "Ceil", "Clip",
    "Concat", "ConcatFromSequence", "Constant", "ConstantOfShape", "Conv", "ConvInteger",
    "ConvTranspose", "Cos", "Cosh", "CumSum", "DepthToSpace", "DequantizeLinear", "Div",
    "DynamicQuantizeLinear", "Einsum", "Elu", "Equal", "Erf", "Exp", "Expand", "EyeLike", "Flatten",
    "Floor", "GRU", "Gather", "GatherElements", "GatherND", "Gelu", "Gemm", "GlobalAveragePool",
    "GlobalMaxPool", "Greater", "GreaterOrEqual", "GridSample", "HardSigmoid", "HardSwish", "Identity",
    "If", "InstanceNormalization", "IsInf", "IsNaN", "LSTM", "LayerNormalization", "LeakyRelu", "Less",
    "LessOrEqual", "Log", "LogSoftmax", "Loop", "LpNormalization", "MatMul", "MatMulInteger", "Max",
    "MaxPool", "Mean", "Min", "Mod", "Mul", "Neg", "NonMaxSuppression", "NonZero", "Not", "OneHot",
    "Or", "PRelu", "Pad", "Pow", "QuantizeLinear", "RMSNormalization", "Range", "Reciprocal",
    "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin",
    "ReduceProd", "ReduceSum", "ReduceSumSquare", "Relu", "Reshape", "Resize", "ReverseSequence",
    "RotaryEmbedding", "Round", "Scatter", "ScatterElements", "ScatterND", "SequenceAt",
    "SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert", "SequenceLength", "Shape",
    "Sigmoid", "Sign", "SimplifiedLayerNormalization", "Sin", "Sinh", "Size", "Slice", "Softmax",
    "Softplus", "Softsign", "Split", "SplitToSequence", "Sqrt", "Squeeze", "Sub", "Sum", "Swish",
    "Tan", "Tanh", "Tile", "TopK", "Transpose", "Trilu", "Unsqueeze", "Upsample", "Where", "Xor",
];

/// The supported operators of the `com.microsoft` domain, sorted.
#[rustfmt::skip]
pub const MICROSOFT: &[&str] = &[
    "BiasGelu", "DynamicQuantizeLSTM", "FastGelu", "Gelu", "GroupQueryAttention", "MatMulNBits",
    "MultiHeadAttention", "QuickGelu", "RotaryEmbedding", "SkipLayerNormalization",
    "SkipSimplifiedLayerNormalization",
];

pub const MICROSOFT_DOMAIN: &str = "com.microsoft";

/// Whether an operator is supported. `domain` is empty or `ai.onnx` for ONNX's own operators.
#[must_use]
pub fn is_supported(domain: &str, op_type: &str) -> bool {
    let table = match domain {
        "" | "ai.onnx" => ONNX,
        MICROSOFT_DOMAIN => MICROSOFT,
        _ => return false,
    };
    table.binary_search(&op_type).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_sorted_so_that_lookup_finds_all() {
        for (domain, table) in [("", ONNX), (MICROSOFT_DOMAIN, MICROSOFT)] {
            assert!(table.is_sorted());
            assert!(table.iter().all(|op| is_supported(domain, op)));
        }
        assert!(is_supported("ai.onnx", "Conv"));
        assert!(!is_supported("", "Dropout"));
        assert!(!is_supported("ai.onnx.ml", "TreeEnsemble"));
    }
}
