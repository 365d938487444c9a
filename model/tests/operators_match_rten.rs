//! Compares the operator table with rten's own registry: the test loads a model of a single node for
//! each operator. Attributes and inputs are missing, so most loads fail. Only an operator that rten
//! lacks fails with an unknown-operator error.

use millrace_model::operators::{MICROSOFT, MICROSOFT_DOMAIN, ONNX, is_supported};
use prost::encoding::{WireType, encode_key, encode_varint};
use rten::ModelOptions;

/// Operators of ONNX 1.21 and of `com.microsoft` that are not in the table.
#[rustfmt::skip]
const OTHERS: &[(&str, &str)] = &[
    ("", "AffineGrid"), ("", "Bernoulli"), ("", "BitShift"), ("", "BitwiseAnd"), ("", "BitwiseNot"),
    ("", "BitwiseOr"), ("", "BitwiseXor"), ("", "BlackmanWindow"), ("", "Celu"), ("", "CenterCropPad"),
    ("", "Col2Im"), ("", "Compress"), ("", "CumProd"), ("", "DFT"), ("", "DeformConv"), ("", "Det"),
    ("", "Dropout"), ("", "GlobalLpPool"), ("", "GroupNormalization"), ("", "HammingWindow"),
    ("", "HannWindow"), ("", "Hardmax"), ("", "ImageDecoder"), ("", "LRN"), ("", "LpPool"),
    ("", "MaxRoiPool"), ("", "MaxUnpool"), ("", "MeanVarianceNormalization"), ("", "MelWeightMatrix"),
    ("", "Mish"), ("", "Multinomial"), ("", "NegativeLogLikelihoodLoss"), ("", "Optional"),
    ("", "OptionalGetElement"), ("", "OptionalHasElement"), ("", "QLinearConv"), ("", "QLinearMatMul"),
    ("", "RNN"), ("", "RandomNormal"), ("", "RandomNormalLike"), ("", "RandomUniform"),
    ("", "RandomUniformLike"), ("", "RegexFullMatch"), ("", "RoiAlign"), ("", "STFT"), ("", "Scan"),
    ("", "Selu"), ("", "SequenceMap"), ("", "Shrink"), ("", "SoftmaxCrossEntropyLoss"),
    ("", "SpaceToDepth"), ("", "StringConcat"), ("", "StringNormalizer"), ("", "StringSplit"),
    ("", "TensorScatter"), ("", "TfIdfVectorizer"), ("", "ThresholdedRelu"), ("", "Unique"),
    ("com.microsoft", "Attention"), ("com.microsoft", "FusedConv"), ("com.microsoft", "FusedMatMul"),
    ("com.microsoft", "EmbedLayerNormalization"), ("com.microsoft", "Conv"),
    ("ai.onnx.ml", "TreeEnsembleRegressor"), ("ai.onnx.ml", "Scaler"), ("example", "Relu"),
];

fn field(tag: u32, bytes: &[u8], out: &mut Vec<u8>) {
    encode_key(tag, WireType::LengthDelimited, out);
    encode_varint(bytes.len() as u64, out);
    out.extend_from_slice(bytes);
}

/// Returns an ONNX model with a single node, which makes `y` without inputs.
fn one_node(domain: &str, op_type: &str) -> Vec<u8> {
    let mut node = Vec::new();
    field(2, b"y", &mut node);
    field(4, op_type.as_bytes(), &mut node);
    field(7, domain.as_bytes(), &mut node);
    let mut graph = Vec::new();
    field(1, &node, &mut graph);
    let mut output = Vec::new();
    field(1, b"y", &mut output);
    field(12, &output, &mut graph);
    let mut model = vec![0x08, 8];
    field(7, &graph, &mut model);
    model
}

fn rten_knows(domain: &str, op_type: &str) -> bool {
    let loaded = ModelOptions::with_all_ops().enable_optimization(false).load(one_node(domain, op_type));
    let Err(error) = loaded else { return true };
    let message = error.to_string();
    !message.contains("operator not supported") && !message.contains("operator not enabled")
}

#[test]
fn rten_knows_every_operator_in_the_table() {
    for op_type in ONNX {
        assert!(rten_knows("", op_type), "{op_type}");
    }
    for op_type in MICROSOFT {
        assert!(rten_knows(MICROSOFT_DOMAIN, op_type), "{op_type}");
    }
}

#[test]
fn rten_refuses_operators_outside_the_table() {
    for (domain, op_type) in OTHERS {
        assert!(!is_supported(domain, op_type), "{domain}::{op_type}");
        assert!(!rten_knows(domain, op_type), "rten has gained {domain}::{op_type}: add it to the table");
    }
}
