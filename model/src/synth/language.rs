//! Transformer encoders.

use super::Seeded;
use super::network::{Attribute, Network, Size};

/// The dimensions of an encoder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Encoder {
    /// Blocks of attention and feed-forward network.
    pub layers: usize,
    /// The width of a token's vector; a multiple of `heads`.
    pub hidden: usize,
    /// Attention heads.
    pub heads: usize,
    /// The width inside the feed-forward network.
    pub inner: usize,
    /// Different tokens.
    pub vocabulary: usize,
    /// The longest text, in tokens.
    pub positions: usize,
}

impl Encoder {
    /// As BERT-base: 109.5 million parameters.
    pub const BASE: Self =
        Self { layers: 12, hidden: 768, heads: 12, inner: 3072, vocabulary: 30_522, positions: 512 };
    /// As BERT-large: 335 million parameters.
    pub const LARGE: Self = Self { layers: 24, hidden: 1024, heads: 16, inner: 4096, ..Self::BASE };
    /// For tests: 1.2 million parameters.
    pub const TINY: Self =
        Self { layers: 4, hidden: 128, heads: 4, inner: 512, vocabulary: 3_000, positions: 64 };
}

impl Seeded {
    /// A BERT-like encoder: embeds `input_ids` INT64 [N, S] (from 0 to the vocabulary's size), runs its
    /// layers, and gives `y` FP32 [N, hidden], the first token's vector through a dense layer and tanh.
    /// S may be up to `positions`; there is no padding mask.
    #[must_use]
    pub fn bert_like(self, encoder: Encoder) -> Vec<u8> {
        let Encoder { layers, hidden, vocabulary, positions, .. } = encoder;
        let mut net = Network::new("bert-like", self.0);
        let ids = net.int64_input("input_ids", &[Size::Named("N"), Size::Named("S")]);
        let words = net.scaled_weight("embedding.words", &[vocabulary, hidden], 1.0);
        let places = net.scaled_weight("embedding.positions", &[positions, hidden], 1.0);
        let word = net.node("Gather", &[&words, &ids], "embedding.word", &[]);
        let length = [Attribute::Int("start", 1), Attribute::Int("end", 2)];
        let length = net.node("Shape", &[&ids], "embedding.length", &length);
        let zero = net.int64s("embedding.zero", &[0]);
        let place = net.node("Slice", &[&places, &zero, &length, &zero], "embedding.position", &[]);
        let sum = net.node("Add", &[&word, &place], "embedding.sum", &[]);
        let mut value = normalize(&mut net, &sum, "embedding", hidden, "embedding.out");
        for layer in 0..layers {
            value = block(&mut net, encoder, &format!("layer{layer}"), &value, &format!("layer{layer}.out"));
        }
        let first = net.int64s("pooler.index", &[0]);
        let first = net.node("Gather", &[&value, &first], "pooler.gather", &[Attribute::Int("axis", 1)]);
        let first = net.node("Flatten", &[&first], "pooler.first", &[]);
        let pooled = dense(&mut net, "pooler", &first, (hidden, hidden));
        net.node("Tanh", &[&pooled], "y", &[]);
        net.float_output("y", &[Size::Named("N"), Size::Fixed(hidden)]);
        net.finish()
    }

    /// One encoder layer by itself, 384 wide with 6 heads: `x` FP32 [N, S, 384] to `y` of the same
    /// shape, with weights for several launches.
    #[must_use]
    pub fn transformer_block(self) -> Vec<u8> {
        let encoder = Encoder { layers: 1, hidden: 384, heads: 6, inner: 1536, vocabulary: 0, positions: 0 };
        let mut net = Network::new("transformer-block", self.0);
        let shape = [Size::Named("N"), Size::Named("S"), Size::Fixed(encoder.hidden)];
        let x = net.float_input("x", &shape);
        block(&mut net, encoder, "layer0", &x, "y");
        net.float_output("y", &shape);
        net.finish()
    }
}

/// Attention and feed-forward network, each added to its input and normalized, as in BERT.
fn block(net: &mut Network, encoder: Encoder, name: &str, input: &str, output: &str) -> String {
    let Encoder { hidden, inner, .. } = encoder;
    let part = |suffix: &str| format!("{name}.{suffix}");
    let attention = attend(net, encoder, &part("attention"), input);
    let sum = net.node("Add", &[&attention, input], &part("attention.sum"), &[]);
    let middle = normalize(net, &sum, &part("attention"), hidden, &part("attention.out"));
    let wide = dense(net, &part("up"), &middle, (hidden, inner));
    let active = gelu(net, &part("gelu"), &wide);
    let narrow = dense(net, &part("down"), &active, (inner, hidden));
    let sum = net.node("Add", &[&narrow, &middle], &part("sum"), &[]);
    normalize(net, &sum, name, hidden, output)
}

fn attend(net: &mut Network, encoder: Encoder, name: &str, input: &str) -> String {
    let Encoder { hidden, heads, .. } = encoder;
    let head = hidden / heads;
    let part = |suffix: &str| format!("{name}.{suffix}");
    let split = net.int64s(&part("split"), &[0, 0, heads as i64, head as i64]);
    let mut project = |suffix: &str, order: &[i64]| {
        let flat = dense(net, &part(suffix), input, (hidden, hidden));
        let shaped = net.node("Reshape", &[&flat, &split], &part(&format!("{suffix}.heads")), &[]);
        let order = [Attribute::Ints("perm", order)];
        net.node("Transpose", &[&shaped], &part(&format!("{suffix}.first")), &order)
    };
    let query = project("query", &[0, 2, 1, 3]);
    let key = project("key", &[0, 2, 3, 1]);
    let value = project("value", &[0, 2, 1, 3]);
    let scores = net.node("MatMul", &[&query, &key], &part("scores"), &[]);
    let scale = net.scalar(&part("scale"), 1.0 / (head as f32).sqrt());
    let scaled = net.node("Mul", &[&scores, &scale], &part("scaled"), &[]);
    let shares = net.node("Softmax", &[&scaled], &part("shares"), &[Attribute::Int("axis", -1)]);
    let mixed = net.node("MatMul", &[&shares, &value], &part("mixed"), &[]);
    let order = [Attribute::Ints("perm", &[0, 2, 1, 3])];
    let mixed = net.node("Transpose", &[&mixed], &part("last"), &order);
    let join = net.int64s(&part("join"), &[0, 0, hidden as i64]);
    let joined = net.node("Reshape", &[&mixed, &join], &part("joined"), &[]);
    dense(net, &part("output"), &joined, (hidden, hidden))
}

fn dense(net: &mut Network, name: &str, input: &str, (from, to): (usize, usize)) -> String {
    let weight = net.weight(&format!("{name}.weight"), &[from, to], 2 * from);
    let bias = net.scaled_weight(&format!("{name}.bias"), &[to], 0.01);
    let product = net.node("MatMul", &[input, &weight], &format!("{name}.product"), &[]);
    net.node("Add", &[&product, &bias], &format!("{name}.dense"), &[])
}

fn normalize(net: &mut Network, input: &str, name: &str, width: usize, output: &str) -> String {
    let gamma = net.filled(&format!("{name}.gamma"), width, 1.0);
    let beta = net.filled(&format!("{name}.beta"), width, 0.0);
    let attributes = [Attribute::Int("axis", -1), Attribute::Float("epsilon", 1e-12)];
    net.node("LayerNormalization", &[input, &gamma, &beta], output, &attributes)
}

/// x·(1 + erf(x/√2))/2, in the nodes that exporters write.
fn gelu(net: &mut Network, name: &str, input: &str) -> String {
    let part = |suffix: &str| format!("{name}.{suffix}");
    let root = net.scalar(&part("root"), std::f32::consts::SQRT_2);
    let one = net.scalar(&part("one"), 1.0);
    let half = net.scalar(&part("half"), 0.5);
    let shrunk = net.node("Div", &[input, &root], &part("shrunk"), &[]);
    let erf = net.node("Erf", &[&shrunk], &part("erf"), &[]);
    let shifted = net.node("Add", &[&erf, &one], &part("shifted"), &[]);
    let gated = net.node("Mul", &[input, &shifted], &part("gated"), &[]);
    net.node("Mul", &[&gated, &half], &part("active"), &[])
}
