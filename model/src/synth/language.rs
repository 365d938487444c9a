//! Transformer encoders.

use super::network::{Attribute, DeclaredDim, GraphWriter};
use super::pixels;
use super::scene::DarknetShape;
use super::seeded::Seeded;

/// Height and width of a line of text, in pixels.
pub const LINE: (usize, usize) = (128, 640);
/// Width of a column of the line in pixels; a column is one character.
pub const COLUMN: usize = 16;
/// Number of characters that the reader of a line knows.
const CHARACTERS: usize = 96;
/// Difference between light and dark in a column with writing, from 0 to 1.
const CONTRAST: f32 = 0.5;

/// The dimensions of an encoder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Encoder {
    /// Number of blocks of attention and feed-forward network.
    pub layers: usize,
    /// Width of a token's vector; a multiple of `heads`.
    pub hidden: usize,
    /// Number of attention heads.
    pub heads: usize,
    /// Width inside the feed-forward network.
    pub inner: usize,
    /// Number of different tokens.
    pub vocabulary: usize,
    /// Most tokens of a text.
    pub positions: usize,
}

impl Encoder {
    /// The size of BERT-base: 109.5 million parameters.
    pub const BASE: Self =
        Self { layers: 12, hidden: 768, heads: 12, inner: 3072, vocabulary: 30_522, positions: 512 };
    /// The size of BERT-large: 335 million parameters.
    pub const LARGE: Self = Self { layers: 24, hidden: 1024, heads: 16, inner: 4096, ..Self::BASE };
    /// The size of DistilBERT: 66 million parameters.
    pub const DISTILLED: Self = Self { layers: 6, ..Self::BASE };
    /// A size for tests: 1.2 million parameters.
    pub const TINY: Self =
        Self { layers: 4, hidden: 128, heads: 4, inner: 512, vocabulary: 3_000, positions: 64 };
}

/// Whether a classifier also outputs the vector of each token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenStates {
    /// The classifier outputs the vectors, as the input of another network.
    Given,
    /// The classifier does not output the vectors.
    Kept,
}

/// Returns a network that prepares a line for reading: `pixels` UINT8 [1, 256, 1280, 3] to `line`
/// FP32 [1, 1, 128, 640], grey from 0 to 1.
#[must_use]
pub fn grey_line() -> Vec<u8> {
    let mut net = GraphWriter::new("grey-line", 0);
    let (height, width) = LINE;
    let pixels =
        net.byte_input("pixels", &[1, 2 * height, 2 * width, pixels::COLOURS].map(DeclaredDim::Fixed));
    let planes = pixels::planes(&mut net, &pixels, "planes");
    let grey = pixels::mix(&mut net, &planes, &[[1.0 / 3.0; 3]], "grey");
    pixels::shrink(&mut net, &grey, 2, "line");
    net.float_output("line", &[1, 1, height, width].map(DeclaredDim::Fixed));
    net.finish()
}

impl Seeded {
    /// Returns a BERT-like encoder. The encoder embeds `input_ids` INT64 [N, S] (from 0 to the
    /// vocabulary's size) and runs its layers. The output `y` FP32 [N, hidden] is the first token's
    /// vector after a dense layer and tanh. S may be up to `positions`; there is no padding mask.
    #[must_use]
    pub fn bert_like(self, encoder: Encoder) -> Vec<u8> {
        let mut net = GraphWriter::new("bert-like", self.0);
        let value = read(&mut net, encoder);
        pool(&mut net, encoder, &value, "y");
        net.float_output("y", &[DeclaredDim::Named("N"), DeclaredDim::Fixed(encoder.hidden)]);
        net.finish()
    }

    /// Returns a classifier: [`Self::bert_like`] with a final layer of two numbers, `input_ids` INT64
    /// [N, S] to `scores` FP32 [N, 2]. If `states` requests that, the classifier also outputs the
    /// vectors of the tokens, `states` FP32 [N, S, hidden].
    #[must_use]
    pub fn bert_classifier(self, encoder: Encoder, states: TokenStates) -> Vec<u8> {
        let mut net = GraphWriter::new("bert-classifier", self.0);
        let value = read(&mut net, encoder);
        let pooled = pool(&mut net, encoder, &value, "pooled");
        let sum = dense(&mut net, "scores", &pooled, encoder.hidden, 2);
        net.node("Softmax", &[&sum], "scores", &[Attribute::Int("axis", -1)]);
        if states == TokenStates::Given {
            net.node("Identity", &[&value], "states", &[]);
            net.float_output("states", &token_shape(encoder));
        }
        net.float_output("scores", &[DeclaredDim::Named("N"), DeclaredDim::Fixed(2)]);
        net.finish()
    }

    /// Returns an encoder that reads the token vectors of another encoder, and outputs the likeliest
    /// token at each position: `states` FP32 [N, S, hidden] to `reply` INT64 [N, S].
    #[must_use]
    pub fn bert_reply(self, encoder: Encoder) -> Vec<u8> {
        let mut net = GraphWriter::new("bert-reply", self.0);
        let states = net.float_input("states", &token_shape(encoder));
        let value = blocks(&mut net, encoder, &states);
        let logits = dense(&mut net, "words", &value, encoder.hidden, encoder.vocabulary);
        let over = [Attribute::Int("axis", -1), Attribute::Int("keepdims", 0)];
        net.node("ArgMax", &[&logits], "reply", &over);
        net.int64_output("reply", &[DeclaredDim::Named("N"), DeclaredDim::Named("S")]);
        net.finish()
    }

    /// Returns a reader of a line of text, `line` FP32 [1, 1, 128, 640], grey from 0 to 1. The
    /// network has the stages of `darknet` except the last, and an encoder of two layers over the
    /// line's 40 columns.
    ///
    /// The output `tokens` INT64 [1, L] has the id of a character for each column with writing, which
    /// is a column with a large difference between light and dark. L may be 0. The output `any_text`
    /// INT64 `[1]` is 1 if there is writing.
    #[must_use]
    pub fn ocr(self, darknet: DarknetShape) -> Vec<u8> {
        let mut net = GraphWriter::new("ocr", self.0);
        let line = net.float_input("line", &[1, 1, LINE.0, LINE.1].map(DeclaredDim::Fixed));
        let (features, hidden) = darknet.add(&mut net, &line, 1, 3);
        let over = [Attribute::Ints("axes", &[2]), Attribute::Int("keepdims", 0)];
        let columns = net.node("ReduceMean", &[&features], "columns.features", &over);
        let order = [Attribute::Ints("perm", &[0, 2, 1])];
        let columns = net.node("Transpose", &[&columns], "columns", &order);
        let encoder =
            Encoder { layers: 2, hidden, heads: 4, inner: 4 * hidden, vocabulary: CHARACTERS, positions: 0 };
        let read = blocks(&mut net, encoder, &columns);
        let logits = dense(&mut net, "characters", &read, hidden, CHARACTERS);
        let over = [Attribute::Int("axis", -1), Attribute::Int("keepdims", 0)];
        let ids = net.node("ArgMax", &[&logits], "ids", &over);
        let scores = contrast(&mut net, &line);
        pixels::choose(&mut net, &ids, 1, &scores, CONTRAST, "tokens", Some("any_text"));
        net.int64_output("tokens", &[DeclaredDim::Fixed(1), DeclaredDim::Named("L")]);
        net.int64_output("any_text", &[DeclaredDim::Fixed(1)]);
        net.finish()
    }

    /// Returns a single encoder layer, 384 wide with 6 heads: `x` FP32 [N, S, 384] to `y` of the same
    /// shape, with weights for several launches.
    #[must_use]
    pub fn transformer_block(self) -> Vec<u8> {
        let encoder = Encoder { layers: 1, hidden: 384, heads: 6, inner: 1536, vocabulary: 0, positions: 0 };
        let mut net = GraphWriter::new("transformer-block", self.0);
        let shape = [DeclaredDim::Named("N"), DeclaredDim::Named("S"), DeclaredDim::Fixed(encoder.hidden)];
        let x = net.float_input("x", &shape);
        block(&mut net, encoder, "layer0", &x, "y");
        net.float_output("y", &shape);
        net.finish()
    }
}

fn token_shape(encoder: Encoder) -> [DeclaredDim; 3] {
    [DeclaredDim::Named("N"), DeclaredDim::Named("S"), DeclaredDim::Fixed(encoder.hidden)]
}

/// Adds the embedding of `input_ids` and all layers. The result is [N, S, hidden].
fn read(net: &mut GraphWriter, encoder: Encoder) -> String {
    let Encoder { hidden, vocabulary, positions, .. } = encoder;
    let ids = net.int64_input("input_ids", &[DeclaredDim::Named("N"), DeclaredDim::Named("S")]);
    let words = net.scaled_weight("embedding.words", &[vocabulary, hidden], 1.0);
    let places = net.scaled_weight("embedding.positions", &[positions, hidden], 1.0);
    let word = net.node("Gather", &[&words, &ids], "embedding.word", &[]);
    let length = [Attribute::Int("start", 1), Attribute::Int("end", 2)];
    let length = net.node("Shape", &[&ids], "embedding.length", &length);
    let zero = net.int64s("embedding.zero", &[0]);
    let place = net.node("Slice", &[&places, &zero, &length, &zero], "embedding.position", &[]);
    let sum = net.node("Add", &[&word, &place], "embedding.sum", &[]);
    let value = normalize(net, &sum, "embedding", hidden, "embedding.out");
    blocks(net, encoder, &value)
}

/// Adds all layers.
fn blocks(net: &mut GraphWriter, encoder: Encoder, input: &str) -> String {
    let mut value = input.to_owned();
    for layer in 0..encoder.layers {
        value = block(net, encoder, &format!("layer{layer}"), &value, &format!("layer{layer}.out"));
    }
    value
}

/// Adds a dense layer and tanh on the first token's vector.
fn pool(net: &mut GraphWriter, encoder: Encoder, value: &str, output: &str) -> String {
    let first = net.int64s("pooler.index", &[0]);
    let first = net.node("Gather", &[value, &first], "pooler.gather", &[Attribute::Int("axis", 1)]);
    let first = net.node("Flatten", &[&first], "pooler.first", &[]);
    let pooled = dense(net, "pooler", &first, encoder.hidden, encoder.hidden);
    net.node("Tanh", &[&pooled], output, &[])
}

/// Adds the difference between light and dark in each column of a line, [1, 40].
fn contrast(net: &mut GraphWriter, line: &str) -> String {
    let light = pixels::pool(net, "MaxPool", line, LINE.0, COLUMN, "contrast.light");
    let turned = net.node("Neg", &[line], "contrast.turned", &[]);
    let dark = pixels::pool(net, "MaxPool", &turned, LINE.0, COLUMN, "contrast.dark");
    let apart = net.node("Add", &[&light, &dark], "contrast.apart", &[]);
    let row = net.int64s("contrast.row", &[1, (LINE.1 / COLUMN) as i64]);
    net.node("Reshape", &[&apart, &row], "contrast", &[])
}

/// Adds attention and a feed-forward network, each added to its input and normalized, as in BERT.
fn block(net: &mut GraphWriter, encoder: Encoder, name: &str, input: &str, output: &str) -> String {
    let Encoder { hidden, inner, .. } = encoder;
    let part = |suffix: &str| format!("{name}.{suffix}");
    let attention = attend(net, encoder, &part("attention"), input);
    let sum = net.node("Add", &[&attention, input], &part("attention.sum"), &[]);
    let middle = normalize(net, &sum, &part("attention"), hidden, &part("attention.out"));
    let wide = dense(net, &part("up"), &middle, hidden, inner);
    let active = gelu(net, &part("gelu"), &wide);
    let narrow = dense(net, &part("down"), &active, inner, hidden);
    let sum = net.node("Add", &[&narrow, &middle], &part("sum"), &[]);
    normalize(net, &sum, name, hidden, output)
}

fn attend(net: &mut GraphWriter, encoder: Encoder, name: &str, input: &str) -> String {
    let Encoder { hidden, heads, .. } = encoder;
    let head = hidden / heads;
    let part = |suffix: &str| format!("{name}.{suffix}");
    let split = net.int64s(&part("split"), &[0, 0, heads as i64, head as i64]);
    let mut project = |suffix: &str, order: &[i64]| {
        let flat = dense(net, &part(suffix), input, hidden, hidden);
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
    dense(net, &part("output"), &joined, hidden, hidden)
}

fn dense(net: &mut GraphWriter, name: &str, input: &str, from: usize, to: usize) -> String {
    let weight = net.weight(&format!("{name}.weight"), &[from, to], 2 * from);
    let bias = net.scaled_weight(&format!("{name}.bias"), &[to], 0.01);
    let product = net.node("MatMul", &[input, &weight], &format!("{name}.product"), &[]);
    net.node("Add", &[&product, &bias], &format!("{name}.dense"), &[])
}

fn normalize(net: &mut GraphWriter, input: &str, name: &str, width: usize, output: &str) -> String {
    let gamma = net.filled(&format!("{name}.gamma"), width, 1.0);
    let beta = net.filled(&format!("{name}.beta"), width, 0.0);
    let attributes = [Attribute::Int("axis", -1), Attribute::Float("epsilon", 1e-12)];
    net.node("LayerNormalization", &[input, &gamma, &beta], output, &attributes)
}

/// Adds x·(1 + erf(x/√2))/2, in the nodes that exporters write.
fn gelu(net: &mut GraphWriter, name: &str, input: &str) -> String {
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
