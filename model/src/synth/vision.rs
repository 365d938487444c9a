//! Residual convolutional networks.

use super::Seeded;
use super::network::{Attribute, Network, Size};

/// What batch normalization multiplies the end of a residual branch by: small, so that activations
/// do not grow from block to block.
const BRANCH_SCALE: f32 = 0.25;

/// A convolution and its batch normalization.
struct Conv<'a> {
    name: &'a str,
    from: usize,
    to: usize,
    kernel: usize,
    stride: usize,
    scale: f32,
}

impl Conv<'_> {
    fn add(&self, net: &mut Network, input: &str) -> String {
        let Self { name, from, to, kernel, stride, scale } = *self;
        let weight =
            net.weight(&format!("{name}.weight"), &[to, from, kernel, kernel], from * kernel * kernel);
        let (kernel, stride) = (kernel as i64, stride as i64);
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

    fn add_rectified(&self, net: &mut Network, input: &str) -> String {
        let norm = self.add(net, input);
        net.node("Relu", &[&norm], &format!("{}.relu", self.name), &[])
    }
}

/// A bottleneck block: 1×1, 3×3, 1×1 convolutions around a shortcut.
struct Bottleneck<'a> {
    name: &'a str,
    from: usize,
    inner: usize,
    stride: usize,
}

impl Bottleneck<'_> {
    /// The block's output has four times its inner channels.
    const EXPANSION: usize = 4;

    fn add(&self, net: &mut Network, input: &str) -> String {
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

/// Averages over the image and maps channels to classes.
fn classify(net: &mut Network, input: &str, channels: usize, classes: usize) {
    let pooled = net.node("GlobalAveragePool", &[input], "pooled", &[]);
    let flat = net.node("Flatten", &[&pooled], "flat", &[]);
    let weight = net.weight("classifier.weight", &[classes, channels], channels);
    let bias = net.scaled_weight("classifier.bias", &[classes], 0.01);
    net.node("Gemm", &[&flat, &weight, &bias], "y", &[Attribute::Int("transB", 1)]);
    net.float_output("y", &[Size::Named("N"), Size::Fixed(classes)]);
}

fn image_input(net: &mut Network, side: usize) -> String {
    net.float_input("x", &[Size::Named("N"), Size::Fixed(3), Size::Fixed(side), Size::Fixed(side)])
}

impl Seeded {
    /// A network with ResNet-50's layers and 25.6 million parameters; batch normalization is left in
    /// its own nodes.
    #[must_use]
    pub fn resnet50_like(self) -> Vec<u8> {
        self.residual("resnet50-like", [3, 4, 6, 3])
    }

    /// The same with ResNet-152's layers and 60.2 million parameters.
    #[must_use]
    pub fn resnet152_like(self) -> Vec<u8> {
        self.residual("resnet152-like", [3, 8, 36, 3])
    }

    /// Bottleneck blocks in four stages.
    fn residual(self, name: &str, blocks: [usize; 4]) -> Vec<u8> {
        let mut net = Network::new(name, self.0);
        let x = image_input(&mut net, 224);
        let stem = Conv { name: "stem", from: 3, to: 64, kernel: 7, stride: 2, scale: 1.0 };
        let stem = stem.add_rectified(&mut net, &x);
        let pool = [
            Attribute::Ints("kernel_shape", &[3, 3]),
            Attribute::Ints("strides", &[2, 2]),
            Attribute::Ints("pads", &[1; 4]),
        ];
        let mut value = net.node("MaxPool", &[&stem], "stem.pool", &pool);
        let mut from = 64;
        for (stage, (inner, blocks)) in [64, 128, 256, 512].into_iter().zip(blocks).enumerate() {
            for block in 0..blocks {
                let name = format!("stage{stage}.block{block}");
                let stride = if stage > 0 && block == 0 { 2 } else { 1 };
                value = Bottleneck { name: &name, from, inner, stride }.add(&mut net, &value);
                from = inner * Bottleneck::EXPANSION;
            }
        }
        classify(&mut net, &value, from, 1000);
        net.finish()
    }

    /// A residual network that runs in milliseconds but has weights for several launches.
    #[must_use]
    pub fn tiny_cnn(self) -> Vec<u8> {
        let mut net = Network::new("tiny-cnn", self.0);
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
