//! ONNX networks of known architectures with seeded random weights, for tests and measurements where
//! the numbers need not mean anything but must stay finite. The same call gives the same bytes.
//!
//! | network | input | output | parameters |
//! |---|---|---|---|
//! | [`mlp`] | `x` FP32 [N, 64] | `y` [N, 64] | 8,320 |
//! | [`tiny_cnn`] | `x` FP32 [N, 3, 32, 32] | `y` [N, 10] | 1.8 million |
//! | [`transformer_block`] | `x` FP32 [N, S, 384] | `y` [N, S, 384] | 1.8 million |
//! | [`resnet50_like`] | `x` FP32 [N, 3, 224, 224] | `y` [N, 1000] | 25.6 million |
//! | [`bert_like`] with [`Encoder::BASE`] | `input_ids` INT64 [N, S] | `y` [N, 768] | 109.5 million |

mod language;
mod network;
mod random;
mod vision;

pub use language::{Encoder, bert_like, transformer_block};
pub use vision::{resnet50_like, tiny_cnn};

use network::{Network, Size};

/// What every network here starts its random numbers from.
const SEED: u64 = 42;

/// A perceptron with one hidden layer, 64-64-64: small enough that a request costs more than the
/// model.
#[must_use]
pub fn mlp() -> Vec<u8> {
    let mut net = Network::new("mlp", SEED);
    let shape = [Size::Named("N"), Size::Fixed(64)];
    let x = net.float_input("x", &shape);
    let layer = |net: &mut Network, input: &str, name: &str, output: &str| {
        let weight = net.weight(&format!("{name}.weight"), &[64, 64], 64);
        let bias = net.scaled_weight(&format!("{name}.bias"), &[64], 0.01);
        net.node("Gemm", &[input, &weight, &bias], output, &[])
    };
    let hidden = layer(&mut net, &x, "hidden", "hidden");
    let active = net.node("Relu", &[&hidden], "active", &[]);
    layer(&mut net, &active, "last", "y");
    net.float_output("y", &shape);
    net.finish()
}
