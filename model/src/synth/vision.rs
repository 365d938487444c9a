//! Convolutional classifiers: residual networks, and AlexNet.

use super::network::{Attribute, DeclaredDim, GraphWriter};
use super::pixels;
use super::seeded::Seeded;

/// Factor of the batch normalization at the end of a residual branch. The factor is small, so that
/// activations do not grow from block to block.
pub(super) const BRANCH_SCALE: f32 = 0.25;

/// A convolution with its batch normalization.
pub(super) struct Conv<'a> {
    pub(super) name: &'a str,
    pub(super) from: usize,
    pub(super) to: usize,
    pub(super) kernel: usize,
    pub(super) stride: usize,
    pub(super) scale: f32,
}

impl Conv<'_> {
    pub(super) fn add(&self, net: &mut GraphWriter, input: &str) -> String {
        let Self { name, from, to, kernel, stride, scale } = *self;
        let weight =
            net.weight(&format!("{name}.weight"), &[to, from, kernel, kernel], from * kernel * kernel);
        let kernel = kernel as i64;
        let stride = stride as i64;
        let attributes = [
            Attribute::Ints("kernel_shape", &[kernel, kernel]),
            Attribute::Ints("strides", &[stride, stride]),
            Attribute::Ints("pads", &[kernel / 2; 4]),
        ];
        let conv = net.node("Conv", &[input, &weight], &format!("{name}.conv"), &attributes);
        let gamma = net.filled(&format!("{name}.gamma"), to, scale);
        let beta = net.filled(&format!("{name}.beta"), to, 0.0);
        let mean = net.filled(&format!("{name}.mean"), to, 0.0);
        let variance = net.filled(&format!("{name}.variance"), to, 1.0);
        let inputs = [conv.as_str(), &gamma, &beta, &mean, &variance];
        net.node("BatchNormalization", &inputs, &format!("{name}.norm"), &[])
    }

    pub(super) fn add_rectified(&self, net: &mut GraphWriter, input: &str) -> String {
        let norm = self.add(net, input);
        net.node("Relu", &[&norm], &format!("{}.relu", self.name), &[])
    }
}

/// A bottleneck block: 1×1, 3×3 and 1×1 convolutions beside a shortcut.
struct Bottleneck<'a> {
    name: &'a str,
    from: usize,
    inner: usize,
    stride: usize,
}

impl Bottleneck<'_> {
    /// Ratio of the block's output channels to its inner channels.
    const EXPANSION: usize = 4;

    fn add(&self, net: &mut GraphWriter, input: &str) -> String {
        let Self { name, from, inner, stride } = *self;
        let to = inner * Self::EXPANSION;
        let part = |suffix: &str| format!("{name}.{suffix}");
        let reduce = Conv { name: &part("reduce"), from, to: inner, kernel: 1, stride: 1, scale: 1.0 };
        let reduced = reduce.add_rectified(net, input);
        let spatial = Conv { name: &part("spatial"), from: inner, to: inner, kernel: 3, stride, scale: 1.0 };
        let mixed = spatial.add_rectified(net, &reduced);
        let expand =
            Conv { name: &part("expand"), from: inner, to, kernel: 1, stride: 1, scale: BRANCH_SCALE };
        let branch = expand.add(net, &mixed);
        let shortcut = if from == to && stride == 1 {
            input.to_owned()
        } else {
            Conv { name: &part("shortcut"), from, to, kernel: 1, stride, scale: 1.0 }.add(net, input)
        };
        let sum = net.node("Add", &[&branch, &shortcut], &part("sum"), &[]);
        net.node("Relu", &[&sum], &part("out"), &[])
    }
}

/// Averages over the image, and maps channels to classes.
fn classify(net: &mut GraphWriter, input: &str, channels: usize, classes: usize) {
    let pooled = net.node("GlobalAveragePool", &[input], "pooled", &[]);
    let flat = net.node("Flatten", &[&pooled], "flat", &[]);
    let weight = net.weight("classifier.weight", &[classes, channels], channels);
    let bias = net.scaled_weight("classifier.bias", &[classes], 0.01);
    net.node("Gemm", &[&flat, &weight, &bias], "y", &[Attribute::Int("transB", 1)]);
    net.float_output("y", &[DeclaredDim::Named("N"), DeclaredDim::Fixed(classes)]);
}

fn image_input(net: &mut GraphWriter, side: usize) -> String {
    net.float_input(
        "x",
        &[DeclaredDim::Named("N"), DeclaredDim::Fixed(3), DeclaredDim::Fixed(side), DeclaredDim::Fixed(side)],
    )
}

/// The dimensions of a residual network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResNetShape {
    /// Number of blocks in each of the four stages.
    pub blocks: [usize; 4],
    /// Number of channels inside the first stage's blocks; each later stage has twice as many.
    pub width: usize,
    /// Height and width of the picture, in pixels.
    pub side: usize,
    /// Factor by which the picture is first enlarged, for small crops.
    pub enlarge: usize,
    /// Number of output classes.
    pub classes: usize,
}

impl ResNetShape {
    /// The size of ResNet-50: 25.6 million parameters.
    pub const FIFTY: Self = Self { blocks: [3, 4, 6, 3], width: 64, side: 224, enlarge: 1, classes: 1000 };
    /// The size of ResNet-152: 60.2 million parameters.
    pub const HUNDRED_FIFTY_TWO: Self = Self { blocks: [3, 8, 36, 3], ..Self::FIFTY };
    /// A size for tests: 0.4 million parameters, most of them for the classes.
    pub const TINY: Self = Self { blocks: [1; 4], width: 8, ..Self::FIFTY };
}

impl Seeded {
    /// Returns a network with ResNet-50's layers and 25.6 million parameters. Batch normalization
    /// stays in nodes of its own.
    #[must_use]
    pub fn resnet50_like(self) -> Vec<u8> {
        self.residual("resnet50-like", ResNetShape::FIFTY)
    }

    /// Returns a network with ResNet-152's layers and 60.2 million parameters.
    #[must_use]
    pub fn resnet152_like(self) -> Vec<u8> {
        self.residual("resnet152-like", ResNetShape::HUNDRED_FIFTY_TWO)
    }

    /// Returns a network of bottleneck blocks in four stages: `x` FP32 [N, 3, side, side] to `y` FP32
    /// [N, classes].
    #[must_use]
    pub fn residual(self, name: &str, dimensions: ResNetShape) -> Vec<u8> {
        let ResNetShape { blocks, width, side, enlarge, classes } = dimensions;
        let mut net = GraphWriter::new(name, self.0);
        let mut x = image_input(&mut net, side);
        if enlarge > 1 {
            x = pixels::enlarge(&mut net, &x, enlarge, "enlarged");
        }
        let stem = Conv { name: "stem", from: 3, to: width, kernel: 7, stride: 2, scale: 1.0 };
        let stem = stem.add_rectified(&mut net, &x);
        let pool = [
            Attribute::Ints("kernel_shape", &[3, 3]),
            Attribute::Ints("strides", &[2, 2]),
            Attribute::Ints("pads", &[1; 4]),
        ];
        let mut value = net.node("MaxPool", &[&stem], "stem.pool", &pool);
        let mut from = width;
        for (stage, blocks) in blocks.into_iter().enumerate() {
            let inner = width << stage;
            for block in 0..blocks {
                let name = format!("stage{stage}.block{block}");
                let stride = if stage > 0 && block == 0 { 2 } else { 1 };
                value = Bottleneck { name: &name, from, inner, stride }.add(&mut net, &value);
                from = inner * Bottleneck::EXPANSION;
            }
        }
        classify(&mut net, &value, from, classes);
        net.finish()
    }

    /// Returns a network with AlexNet's layers, without its dropout and its normalization across
    /// channels: `x` FP32 [N, 3, 224, 224] to `y` FP32 [N, 1000]. A width of 64 gives 61 million
    /// parameters, nearly all in the dense layers.
    #[must_use]
    pub fn alexnet_like(self, width: usize) -> Vec<u8> {
        let mut net = GraphWriter::new("alexnet-like", self.0);
        let mut value = image_input(&mut net, 224);
        // The five convolutions: channels for a width of 64, kernel, stride, and whether a pool follows.
        let layers =
            [(64, 11, 4, true), (192, 5, 1, true), (384, 3, 1, false), (256, 3, 1, false), (256, 3, 1, true)];
        let mut from = 3;
        for (number, (channels, kernel, stride, pools)) in layers.into_iter().enumerate() {
            let to = channels * width / 64;
            let name = format!("conv{number}");
            value =
                Conv { name: &name, from, to, kernel, stride, scale: 1.0 }.add_rectified(&mut net, &value);
            if pools {
                let pool = [Attribute::Ints("kernel_shape", &[3, 3]), Attribute::Ints("strides", &[2, 2])];
                value = net.node("MaxPool", &[&value], &format!("{name}.pool"), &pool);
            }
            from = to;
        }
        let mut value = net.node("Flatten", &[&value], "flat", &[]);
        let inner = 4096 * width / 64;
        let dense = [("dense0", from * 36, inner), ("dense1", inner, inner), ("y", inner, 1000)];
        for (name, from, to) in dense {
            let weight = net.weight(&format!("{name}.weight"), &[to, from], from);
            let bias = net.scaled_weight(&format!("{name}.bias"), &[to], 0.01);
            value = net.node("Gemm", &[&value, &weight, &bias], name, &[Attribute::Int("transB", 1)]);
            if name != "y" {
                value = net.node("Relu", &[&value], &format!("{name}.relu"), &[]);
            }
        }
        net.float_output("y", &[DeclaredDim::Named("N"), DeclaredDim::Fixed(1000)]);
        net.finish()
    }

    /// Returns a residual network that runs in milliseconds but has weights for several launches.
    #[must_use]
    pub fn tiny_cnn(self) -> Vec<u8> {
        let mut net = GraphWriter::new("tiny-cnn", self.0);
        let x = image_input(&mut net, 32);
        let stem = Conv { name: "stem", from: 3, to: 64, kernel: 3, stride: 4, scale: 1.0 };
        let mut value = stem.add_rectified(&mut net, &x);
        let mut from = 64;
        for block in 0..3 {
            let stride = if block == 0 { 2 } else { 1 };
            value =
                Bottleneck { name: &format!("block{block}"), from, inner: 192, stride }.add(&mut net, &value);
            from = 192 * Bottleneck::EXPANSION;
        }
        classify(&mut net, &value, from, 10);
        net.finish()
    }
}
