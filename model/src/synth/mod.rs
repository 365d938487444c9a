//! ONNX networks of known architectures with seeded random weights. The networks are for tests and
//! measurements in which the numbers have no meaning, but must stay finite. Some networks, such as
//! [`detector`], have fixed weights. The same call always returns the same bytes.
//!
//! | network | input | output | parameters |
//! |---|---|---|---|
//! | [`mlp`] | `x` FP32 [N, 64] | `y` [N, 64] | 8,320 |
//! | [`tiny_cnn`] | `x` FP32 [N, 3, 32, 32] | `y` [N, 10] | 1.8 million |
//! | [`transformer_block`] | `x` FP32 [N, S, 384] | `y` [N, S, 384] | 1.8 million |
//! | [`resnet50_like`] | `x` FP32 [N, 3, 224, 224] | `y` [N, 1000] | 25.6 million |
//! | [`resnet152_like`] | `x` FP32 [N, 3, 224, 224] | `y` [N, 1000] | 60.2 million |
//! | [`bert_like`] with [`Encoder::BASE`] | `input_ids` INT64 [N, S] | `y` [N, 768] | 109.5 million |
//! | [`bert_like`] with [`Encoder::LARGE`] | `input_ids` INT64 [N, S] | `y` [N, 1024] | 335 million |
//! | [`counter`] | `x` and `h_in` FP32 [1, width] | `y` and `h_out` [1, width] | width + 1 |
//! | [`detector`] | `frame` FP32 [1, 3, 512, 512] | `people` [P, 3, 32, 32], `vehicles` [V, 3, 32, 32], `any_people` and `any_vehicles` INT64 `[1]` | 6,144 |
//!
//! The module also has the networks of the example workflows, whose shapes are documented at their
//! functions. [`camera`], [`chunks`], [`grey_line`], [`denoiser`], [`crops`], [`painter`] and
//! [`vote`] have fixed weights. [`Seeded::yolo_det`], [`Seeded::yolo_seg`], [`Seeded::yolo_face`],
//! [`Seeded::ocr`], [`Seeded::alexnet_like`], [`Seeded::residual`], [`Seeded::bert_classifier`] and
//! [`Seeded::bert_reply`] have weights from a seed.

mod counter;
mod language;
mod network;
mod pixels;
mod random;
mod scene;
mod seeded;
mod traffic;
mod vision;

pub use counter::{GAIN, KEPT, counter};
pub use language::{COLUMN, Encoder, LINE, TokenStates, grey_line};
pub use scene::{
    CELL_SIDE, CELLS, CHUNK, CROP_SIDE, DarknetShape, PHOTO_SIDE, PICTURE, VIEW, camera, chunks, crops,
    denoiser, painter, vote,
};
pub use seeded::Seeded;
pub use traffic::{FRAME_SIDE, PATCH_SIDE, PATCHES_ACROSS, THRESHOLD, detector};
pub use vision::ResNetShape;

use network::{DeclaredDim, GraphWriter};

impl Seeded {
    /// Returns a perceptron with one hidden layer, 64-64-64. The model is so small that a request
    /// costs more than its run.
    #[must_use]
    pub fn mlp(self) -> Vec<u8> {
        let mut net = GraphWriter::new("mlp", self.0);
        let shape = [DeclaredDim::Named("N"), DeclaredDim::Fixed(64)];
        let x = net.float_input("x", &shape);
        let layer = |net: &mut GraphWriter, input: &str, name: &str, output: &str| {
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
}

/// Returns [`Seeded::mlp`] with the default seed.
#[must_use]
pub fn mlp() -> Vec<u8> {
    Seeded::default().mlp()
}

/// Returns [`Seeded::tiny_cnn`] with the default seed.
#[must_use]
pub fn tiny_cnn() -> Vec<u8> {
    Seeded::default().tiny_cnn()
}

/// Returns [`Seeded::transformer_block`] with the default seed.
#[must_use]
pub fn transformer_block() -> Vec<u8> {
    Seeded::default().transformer_block()
}

/// Returns [`Seeded::resnet50_like`] with the default seed.
#[must_use]
pub fn resnet50_like() -> Vec<u8> {
    Seeded::default().resnet50_like()
}

/// Returns [`Seeded::resnet152_like`] with the default seed.
#[must_use]
pub fn resnet152_like() -> Vec<u8> {
    Seeded::default().resnet152_like()
}

/// Returns [`Seeded::bert_like`] with the default seed.
#[must_use]
pub fn bert_like(encoder: Encoder) -> Vec<u8> {
    Seeded::default().bert_like(encoder)
}
