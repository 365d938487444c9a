//! The networks that the example workflows run on pictures, except the classifiers: preparation,
//! detectors and a segmenter in the manner of YOLO, and the processing of their results.
//!
//! None of these networks is trained, but the found objects must not depend on chance. Therefore a
//! head adds two terms: a fixed filter for a colour, which decides, and a hundredth of the seeded
//! network's output, which makes the whole network necessary.

use super::network::{Attribute, DeclaredDim, GraphWriter};
use super::pixels::{self, COLOURS};
use super::seeded::Seeded;
use super::vision::{BRANCH_SCALE, Conv};

/// Height and width of a camera's picture, in pixels.
pub const PICTURE: (usize, usize) = (768, 1280);
/// Height and width of a detector's input, in pixels: half of [`PICTURE`].
pub const VIEW: (usize, usize) = (384, 640);
/// Side of a cell of the detector's grid, in pixels of its input.
pub const CELL_SIDE: usize = 32;
/// Number of cells down and across the detector's input.
pub const CELLS: (usize, usize) = (VIEW.0 / CELL_SIDE, VIEW.1 / CELL_SIDE);
/// Side of a crop: a cell in pixels of the picture.
pub const CROP_SIDE: usize = 2 * CELL_SIDE;
/// Number of frames of a video chunk.
pub const CHUNK: usize = 2;
/// Side of a picture to classify, in pixels.
pub const PHOTO_SIDE: usize = 896;

/// Score above which a cell contains an object; a pure colour has a score of 1.
const THRESHOLD: f32 = 0.25;
/// Largest contribution of the seeded network to a score, in either direction.
const SEEDED_SHARE: f32 = 0.01;
/// Weights of the channels in the filter for each colour.
const RED: [f32; COLOURS] = [1.0, -0.5, -0.5];
const GREEN: [f32; COLOURS] = [-0.5, 1.0, -0.5];
const BLUE: [f32; COLOURS] = [-0.5, -0.5, 1.0];
const YELLOW: [f32; COLOURS] = [0.5, 0.5, -1.0];
/// Filters of the segmenter's classes. The first class is the road, which is grey and so has no colour.
const CLASSES: [[f32; COLOURS]; 4] = [[0.0; COLOURS], RED, BLUE, GREEN];
/// Side of a segmenter's cell, in pixels of the picture.
const SEGMENT_SIDE: usize = 4;

/// The dimensions of a detector's network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DarknetShape {
    /// Number of residual blocks in each stage. Each stage halves the picture and doubles the channels.
    pub blocks: [usize; 4],
    /// Number of channels of the first convolution.
    pub width: usize,
}

impl DarknetShape {
    /// The size of YOLOv5s: 7.2 million parameters.
    pub const SMALL: Self = Self { blocks: [1, 2, 3, 3], width: 32 };
    /// The size of YOLOv5n: 1.9 million parameters.
    pub const NANO: Self = Self { width: 16, ..Self::SMALL };
    /// A size for tests: 50,000 parameters.
    pub const TINY: Self = Self { blocks: [1; 4], width: 4 };

    /// Adds the first `stages` stages, at most four, over `image` with `from` channels. Each stage
    /// halves the picture, as the first convolution does. Returns the name of the value, and its
    /// channels.
    pub(super) fn add(
        self,
        net: &mut GraphWriter,
        image: &str,
        from: usize,
        stages: usize,
    ) -> (String, usize) {
        let stem = Conv { name: "stem", from, to: self.width, kernel: 3, stride: 2, scale: 1.0 };
        let mut value = stem.add_rectified(net, image);
        let mut channels = self.width;
        for (stage, blocks) in self.blocks.into_iter().enumerate().take(stages) {
            let name = format!("stage{stage}");
            let to = 2 * channels;
            let down = Conv { name: &name, from: channels, to, kernel: 3, stride: 2, scale: 1.0 };
            value = down.add_rectified(net, &value);
            channels = to;
            for block in 0..blocks {
                value = residual(net, &format!("{name}.block{block}"), channels, &value);
            }
        }
        (value, channels)
    }

    /// Adds scores for `classes` classes after the last stage, each at most [`SEEDED_SHARE`] in
    /// either direction.
    fn head(self, net: &mut GraphWriter, image: &str, classes: usize) -> String {
        let (value, channels) = self.add(net, image, COLOURS, self.blocks.len());
        let weight = net.weight("head.weight", &[classes, channels, 1, 1], channels);
        let kernel = [Attribute::Ints("kernel_shape", &[1, 1])];
        let raw = net.node("Conv", &[&value, &weight], "head.raw", &kernel);
        let bounded = net.node("Tanh", &[&raw], "head.bounded", &[]);
        let share = net.scalar("head.share", SEEDED_SHARE);
        net.node("Mul", &[&bounded, &share], "head", &[])
    }
}

/// Adds a 1×1 and a 3×3 convolution beside a shortcut.
fn residual(net: &mut GraphWriter, name: &str, channels: usize, input: &str) -> String {
    let part = |suffix: &str| format!("{name}.{suffix}");
    let inner = channels / 2;
    let reduce = Conv { name: &part("reduce"), from: channels, to: inner, kernel: 1, stride: 1, scale: 1.0 };
    let reduced = reduce.add_rectified(net, input);
    let scale = BRANCH_SCALE;
    let spatial = part("spatial");
    let spatial = Conv { name: &spatial, from: inner, to: channels, kernel: 3, stride: 1, scale };
    let branch = spatial.add_rectified(net, &reduced);
    net.node("Add", &[&branch, input], &part("sum"), &[])
}

fn colours(size: (usize, usize)) -> [DeclaredDim; 4] {
    [
        DeclaredDim::Fixed(1),
        DeclaredDim::Fixed(COLOURS),
        DeclaredDim::Fixed(size.0),
        DeclaredDim::Fixed(size.1),
    ]
}

fn pixel_input(net: &mut GraphWriter, size: (usize, usize)) -> String {
    let (height, width) = size;
    let shape = [
        DeclaredDim::Fixed(1),
        DeclaredDim::Fixed(height),
        DeclaredDim::Fixed(width),
        DeclaredDim::Fixed(COLOURS),
    ];
    net.byte_input("pixels", &shape)
}

/// Returns a network from `pixels` UINT8 [1, 768, 1280, 3] to `frame` FP32 [1, 3, 768, 1280], from 0
/// to 1, and to `view` FP32 [1, 3, 384, 640], which is half as large.
#[must_use]
pub fn camera() -> Vec<u8> {
    let mut net = GraphWriter::new("camera", 0);
    let pixels = pixel_input(&mut net, PICTURE);
    pixels::planes(&mut net, &pixels, "frame");
    pixels::shrink(&mut net, "frame", 2, "view");
    net.float_output("frame", &colours(PICTURE));
    net.float_output("view", &colours(VIEW));
    net.finish()
}

/// Returns a network that crops the found objects. Its inputs are `frame` of [`camera`] and `scores`
/// FP32 [1, 2, 12, 20]. Its outputs `people` [P, 3, 64, 64] and `vehicles` [V, 3, 64, 64] are the
/// cells with a score above a quarter, and P and V may be 0. Its outputs `any_people` and
/// `any_vehicles` INT64 `[1]` are 1 if there is such a cell.
#[must_use]
pub fn crops() -> Vec<u8> {
    let mut net = GraphWriter::new("crops", 0);
    let frame = net.float_input("frame", &colours(PICTURE));
    let scores = score_shape(2);
    let scores = net.float_input("scores", &scores);
    let cells = pixels::cells(&mut net, &frame, 1, CELLS.0, CELLS.1, CROP_SIDE, "cells");
    let list = net.int64s("scores.list", &[2, (CELLS.0 * CELLS.1) as i64]);
    let scores = net.node("Reshape", &[&scores, &list], "scores.rows", &[]);
    let kinds = [("people", "any_people", "P"), ("vehicles", "any_vehicles", "V")];
    for (row, (name, any, count)) in (0..).zip(kinds) {
        let row = net.int64s(&format!("{name}.row"), &[row]);
        let axis = [Attribute::Int("axis", 0)];
        let own = net.node("Gather", &[&scores, &row], &format!("{name}.scores"), &axis);
        pixels::choose(&mut net, &cells, 0, &own, THRESHOLD, name, Some(any));
        let side = DeclaredDim::Fixed(CROP_SIDE);
        net.float_output(name, &[DeclaredDim::Named(count), DeclaredDim::Fixed(COLOURS), side, side]);
        net.int64_output(any, &[DeclaredDim::Fixed(1)]);
    }
    net.finish()
}

fn score_shape(classes: usize) -> [DeclaredDim; 4] {
    [1, classes, CELLS.0, CELLS.1].map(DeclaredDim::Fixed)
}

/// Detail below this amplitude is noise, which the denoiser removes; larger detail is an edge.
const NOISE: f32 = 0.05;

/// Returns a network from `pixels` UINT8 [1, H, W, 3] to `image` FP32 [1, 3, H / shrink, W / shrink],
/// from 0 to 1 and without noise. `size` is H and W. Edges are kept, and smaller detail is smoothed.
#[must_use]
pub fn denoiser(size: (usize, usize), shrink: usize) -> Vec<u8> {
    let (height, width) = size;
    let mut net = GraphWriter::new("denoiser", 0);
    let pixels = pixel_input(&mut net, size);
    let planes = pixels::planes(&mut net, &pixels, "planes");
    let smooth = pixels::blur(&mut net, &planes, 5, "smooth");
    let detail = net.node("Sub", &[&planes, &smooth], "detail", &[]);
    let low = net.scalar("noise.low", -NOISE);
    let high = net.scalar("noise.high", NOISE);
    let noise = net.node("Clip", &[&detail, &low, &high], "noise", &[]);
    let last = if shrink > 1 { "clean" } else { "image" };
    let clean = net.node("Sub", &[&planes, &noise], last, &[]);
    if shrink > 1 {
        pixels::shrink(&mut net, &clean, shrink, "image");
    }
    net.float_output("image", &colours((height / shrink, width / shrink)));
    net.finish()
}

/// Returns a network that paints the road of `image` FP32 [1, 3, 768, 1280] green and blurs
/// everything else. The classes come from `shares` FP32 [1, 4, 192, 320]. The output is `picture`
/// UINT8 [1, 768, 1280, 3].
#[must_use]
pub fn painter() -> Vec<u8> {
    let mut net = GraphWriter::new("painter", 0);
    let image = net.float_input("image", &colours(PICTURE));
    let shares = net.float_input("shares", &share_shape());
    let over = [Attribute::Int("axis", 1)];
    let class = net.node("ArgMax", &[&shares], "class", &over);
    let road = net.int64s("road", &[0]);
    let road = net.node("Equal", &[&class, &road], "is_road", &[]);
    let to = [Attribute::Int("to", i64::from(crate::onnx::element::FLOAT))];
    let road = net.node("Cast", &[&road], "mask.small", &to);
    let mask = pixels::enlarge(&mut net, &road, SEGMENT_SIDE, "mask");
    let blurred = pixels::blur(&mut net, &image, 15, "blurred");
    let paint = net.floats("paint", &[1, COLOURS, 1, 1], &[0.0, 0.4, 0.0]);
    let strength = net.scalar("strength", 0.6);
    let dimmed = net.node("Mul", &[&image, &strength], "dimmed", &[]);
    let painted = net.node("Add", &[&dimmed, &paint], "painted", &[]);
    let change = net.node("Sub", &[&painted, &blurred], "change", &[]);
    let change = net.node("Mul", &[&change, &mask], "change.masked", &[]);
    let all = net.node("Add", &[&blurred, &change], "all", &[]);
    pixels::bytes(&mut net, &all, "picture");
    let (height, width) = PICTURE;
    let shape = [
        DeclaredDim::Fixed(1),
        DeclaredDim::Fixed(height),
        DeclaredDim::Fixed(width),
        DeclaredDim::Fixed(COLOURS),
    ];
    net.byte_output("picture", &shape);
    net.finish()
}

fn share_shape() -> [DeclaredDim; 4] {
    [1, CLASSES.len(), PICTURE.0 / SEGMENT_SIDE, PICTURE.1 / SEGMENT_SIDE].map(DeclaredDim::Fixed)
}

/// Returns a network that splits `frames` frames of a video, `pixels` UINT8 [frames, 384, 640, 3],
/// into `chunks` FP32 [frames / 2, 2, 3, 384, 640].
#[must_use]
pub fn chunks(frames: usize) -> Vec<u8> {
    let mut net = GraphWriter::new("chunks", 0);
    let (height, width) = VIEW;
    let pixels = net.byte_input("pixels", &[frames, height, width, COLOURS].map(DeclaredDim::Fixed));
    let planes = pixels::planes(&mut net, &pixels, "planes");
    let shape = [frames / CHUNK, CHUNK, COLOURS, height, width];
    let sizes = net.int64s("chunks.shape", &shape.map(|size| size as i64));
    net.node("Reshape", &[&planes, &sizes], "chunks", &[]);
    net.float_output("chunks", &shape.map(DeclaredDim::Fixed));
    net.finish()
}

/// Returns a network that averages two classifiers: `a` and `b` FP32 [1, 1000] to `probabilities` of
/// the same shape and to `label` INT64 `[1]`.
#[must_use]
pub fn vote() -> Vec<u8> {
    let mut net = GraphWriter::new("vote", 0);
    let shape = [DeclaredDim::Fixed(1), DeclaredDim::Fixed(1000)];
    let shares = ["a", "b"].map(|name| {
        let logits = net.float_input(name, &shape);
        net.node("Softmax", &[&logits], &format!("{name}.shares"), &[Attribute::Int("axis", -1)])
    });
    net.node("Mean", &[&shares[0], &shares[1]], "probabilities", &[]);
    let over = [Attribute::Int("axis", -1), Attribute::Int("keepdims", 0)];
    net.node("ArgMax", &["probabilities"], "label", &over);
    net.float_output("probabilities", &shape);
    net.int64_output("label", &[DeclaredDim::Fixed(1)]);
    net.finish()
}

impl Seeded {
    /// Returns a detector from `view` FP32 [1, 3, 384, 640] to `scores` FP32 [1, 2, 12, 20]. The
    /// scores tell how much each cell of 32 × 32 pixels is a person (red) and a vehicle (blue).
    #[must_use]
    pub fn yolo_det(self, darknet: DarknetShape) -> Vec<u8> {
        let mut net = GraphWriter::new("yolo-det", self.0);
        let view = net.float_input("view", &colours(VIEW));
        let seeded = darknet.head(&mut net, &view, 2);
        let mixed = pixels::mix(&mut net, &view, &[RED, BLUE], "colours");
        let filtered = pixels::shrink(&mut net, &mixed, CELL_SIDE, "filtered");
        net.node("Add", &[&filtered, &seeded], "scores", &[]);
        net.float_output("scores", &score_shape(2));
        net.finish()
    }

    /// Returns a segmenter from `image` FP32 [1, 3, 768, 1280] to `shares` FP32 [1, 4, 192, 320]. The
    /// shares tell how likely each 4 × 4 pixels are road (grey), person (red), vehicle (blue) and
    /// plants (green).
    #[must_use]
    pub fn yolo_seg(self, darknet: DarknetShape) -> Vec<u8> {
        let mut net = GraphWriter::new("yolo-seg", self.0);
        let image = net.float_input("image", &colours(PICTURE));
        let view = pixels::shrink(&mut net, &image, 2, "view");
        let seeded = darknet.head(&mut net, &view, CLASSES.len());
        let seeded = pixels::enlarge(&mut net, &seeded, 2 * CELL_SIDE / SEGMENT_SIDE, "seeded");
        let mixed = pixels::mix(&mut net, &image, &CLASSES, "colours");
        let filtered = pixels::shrink(&mut net, &mixed, SEGMENT_SIDE, "filtered");
        // A grey pixel scores 0 for all colours, so the bias makes it road; a colour must exceed the bias.
        let bias = net.floats("bias", &[1, CLASSES.len(), 1, 1], &[THRESHOLD, 0.0, 0.0, 0.0]);
        let biased = net.node("Add", &[&filtered, &bias], "biased", &[]);
        let sum = net.node("Add", &[&biased, &seeded], "sum", &[]);
        net.node("Softmax", &[&sum], "shares", &[Attribute::Int("axis", 1)]);
        net.float_output("shares", &share_shape());
        net.finish()
    }

    /// Returns a face detector from `chunk` FP32 [1, 2, 3, 384, 640], two frames, to `faces` FP32 [F,
    /// 3, 32, 32], the yellow cells of both frames. F may be 0.
    #[must_use]
    pub fn yolo_face(self, darknet: DarknetShape) -> Vec<u8> {
        let mut net = GraphWriter::new("yolo-face", self.0);
        let (height, width) = VIEW;
        let chunk = net.float_input("chunk", &[1, CHUNK, COLOURS, height, width].map(DeclaredDim::Fixed));
        let shape = net.int64s("frames.shape", &[CHUNK, COLOURS, height, width].map(|size| size as i64));
        let frames = net.node("Reshape", &[&chunk, &shape], "frames", &[]);
        let seeded = darknet.head(&mut net, &frames, 1);
        let mixed = pixels::mix(&mut net, &frames, &[YELLOW], "colours");
        let filtered = pixels::shrink(&mut net, &mixed, CELL_SIDE, "filtered");
        let scores = net.node("Add", &[&filtered, &seeded], "scores", &[]);
        let list = net.int64s("scores.list", &[1, (CHUNK * CELLS.0 * CELLS.1) as i64]);
        let scores = net.node("Reshape", &[&scores, &list], "scores.row", &[]);
        let cells = pixels::cells(&mut net, &frames, CHUNK, CELLS.0, CELLS.1, CELL_SIDE, "cells");
        pixels::choose(&mut net, &cells, 0, &scores, THRESHOLD, "faces", None);
        let side = DeclaredDim::Fixed(CELL_SIDE);
        net.float_output("faces", &[DeclaredDim::Named("F"), DeclaredDim::Fixed(COLOURS), side, side]);
        net.finish()
    }
}
