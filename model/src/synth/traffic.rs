//! A detector of coloured squares, for demonstrating and testing workflows. The number of found
//! objects, and therefore the steps that run afterwards, depend on the frame. None of its weights are
//! trained.
//!
//! The frame has 16 × 16 patches of 32 × 32 pixels. A convolution is a matched filter over each
//! patch: the mean of red minus half the means of green and blue, and the same for blue. A red patch
//! above [`THRESHOLD`] is a person, and a blue one is a vehicle. Grey of any brightness is neither.

use super::network::{Attribute, DeclaredDim, GraphWriter};
use super::pixels::{self, COLOURS};

/// Height and width of the frame, in pixels.
pub const FRAME_SIDE: usize = 512;
/// Height and width of a patch, in pixels.
pub const PATCH_SIDE: usize = 32;
/// Number of patches along a side of the frame.
pub const PATCHES_ACROSS: usize = FRAME_SIDE / PATCH_SIDE;
/// Score above which a patch contains an object; a patch of a pure colour has a score of 1.
pub const THRESHOLD: f32 = 0.25;

const PATCHES: usize = PATCHES_ACROSS * PATCHES_ACROSS;

/// A kind of object to find.
#[derive(Clone, Copy)]
struct Kind {
    name: &'static str,
    any: &'static str,
    /// Name of the dimension for the number of found objects.
    count: &'static str,
    /// Row of this kind in the scores.
    row: i64,
}

const PEOPLE: Kind = Kind { name: "people", any: "any_people", count: "P", row: 0 };
const VEHICLES: Kind = Kind { name: "vehicles", any: "any_vehicles", count: "V", row: 1 };

/// Returns the detector. Its input is `frame` FP32 [1, 3, 512, 512] (red, green, blue from 0 to 1).
/// Its outputs `people` FP32 [P, 3, 32, 32] and `vehicles` FP32 [V, 3, 32, 32] are the found patches,
/// row by row in the order of the frame, and P and V may be 0. Its outputs `any_people` and
/// `any_vehicles` INT64 `[1]` are 1 if there is such a patch, and 0 otherwise.
#[must_use]
pub fn detector() -> Vec<u8> {
    let mut net = GraphWriter::new("detector", 0);
    let side = DeclaredDim::Fixed(FRAME_SIDE);
    let frame = net.float_input("frame", &[DeclaredDim::Fixed(1), DeclaredDim::Fixed(COLOURS), side, side]);
    let patches = cut(&mut net, &frame);
    let scores = score(&mut net, &frame);
    for kind in [PEOPLE, VEHICLES] {
        kind.find(&mut net, &scores, &patches);
    }
    net.finish()
}

/// Adds the frame's patches, [256, 3, 32, 32], row by row.
fn cut(net: &mut GraphWriter, frame: &str) -> String {
    let across = PATCHES_ACROSS as i64;
    let side = PATCH_SIDE as i64;
    let grid = net.int64s("patches.grid", &[COLOURS as i64, across, side, across, side]);
    let grid = net.node("Reshape", &[frame, &grid], "patches.apart", &[]);
    let order = [Attribute::Ints("perm", &[1, 3, 0, 2, 4])];
    let turned = net.node("Transpose", &[&grid], "patches.in_order", &order);
    let list = net.int64s("patches.list", &[PATCHES as i64, COLOURS as i64, side, side]);
    net.node("Reshape", &[&turned, &list], "patches", &[])
}

/// Adds scores for how red and how blue each patch is, [2, 256].
fn score(net: &mut GraphWriter, frame: &str) -> String {
    let of = |wanted: usize| (0..COLOURS).map(move |colour| if colour == wanted { 1.0 } else { -0.5 });
    let pixels = (PATCH_SIDE * PATCH_SIDE) as f32;
    let taps = of(0).chain(of(2)).flat_map(|tap| vec![tap / pixels; PATCH_SIDE * PATCH_SIDE]);
    let taps: Vec<f32> = taps.collect();
    let filter = net.floats("filter", &[2, COLOURS, PATCH_SIDE, PATCH_SIDE], &taps);
    let side = PATCH_SIDE as i64;
    let attributes =
        [Attribute::Ints("kernel_shape", &[side, side]), Attribute::Ints("strides", &[side, side])];
    let map = net.node("Conv", &[frame, &filter], "scores.map", &attributes);
    let list = net.int64s("scores.list", &[2, PATCHES as i64]);
    net.node("Reshape", &[&map, &list], "scores", &[])
}

impl Kind {
    /// Adds the patches of this kind, and whether there are any, as outputs.
    fn find(&self, net: &mut GraphWriter, scores: &str, patches: &str) {
        let Self { name, any, count, row } = *self;
        let part = |suffix: &str| format!("{name}.{suffix}");
        let row = net.int64s(&part("row"), &[row]);
        let own = net.node("Gather", &[scores, &row], &part("scores"), &[Attribute::Int("axis", 0)]);
        pixels::choose(net, patches, 0, &own, THRESHOLD, name, Some(any));
        let side = DeclaredDim::Fixed(PATCH_SIDE);
        net.float_output(name, &[DeclaredDim::Named(count), DeclaredDim::Fixed(COLOURS), side, side]);
        net.int64_output(any, &[DeclaredDim::Fixed(1)]);
    }
}
