//! Inputs of the example workflows: pictures of coloured squares as PNG, and comments as tokens.
//! Drawing is deterministic.

use image::ImageEncoder as _;
use image::codecs::png::{CompressionType, FilterType, PngEncoder};
use millrace_model::synth::{CELL_SIDE, CELLS, COLUMN, CROP_SIDE, LINE, PHOTO_SIDE, PICTURE, VIEW};

use crate::failure::CommandFailure;

/// The number of frames of the video.
pub(super) const FRAMES: usize = 6;
/// The number of faces in each frame. The second chunk has none.
const FACES: [usize; FRAMES] = [2, 1, 0, 0, 1, 1];
/// The number of comments, and the tokens of each.
const COMMENTS: (usize, usize) = (8, 32);
/// The bound of the tokens, which is within the vocabulary of every network.
const VOCABULARY: usize = 3000;

type Colour = [u8; 3];

const GREY: Colour = [96; 3];
const RED: Colour = [230, 30, 40];
const GREEN: Colour = [30, 200, 40];
const BLUE: Colour = [20, 40, 220];
const YELLOW: Colour = [230, 210, 40];
const WHITE: Colour = [235; 3];
const BLACK: Colour = [20; 3];

/// A picture as pixels, row by row.
struct Canvas {
    height: usize,
    width: usize,
    pixels: Vec<Colour>,
}

impl Canvas {
    /// Creates a plain canvas with a little noise, equal in all channels.
    fn new((height, width): (usize, usize), colour: Colour) -> Self {
        let noisy = |at: usize| colour.map(|channel| channel + (at * 7919 % 11) as u8);
        Self { height, width, pixels: (0..height * width).map(noisy).collect() }
    }

    fn fill(&mut self, (top, left): (usize, usize), (height, width): (usize, usize), colour: Colour) {
        for y in top..(top + height).min(self.height) {
            let row = y * self.width;
            let right = (left + width).min(self.width);
            self.pixels[row + left..row + right].fill(colour);
        }
    }

    /// Draws a square in each of `count` cells from cell number `from` on, scattered over the
    /// picture.
    fn scatter(&mut self, side: usize, (from, count): (usize, usize), colour: Colour) {
        let rows = self.height / side;
        let across = self.width / side;
        for number in from..from + count {
            // 89 is coprime to the number of cells, so no two squares share a cell.
            let cell = (number * 89 + 31) % (rows * across);
            let corner = (cell / across * side + 2, cell % across * side + 2);
            self.fill(corner, (side - 4, side - 4), colour);
        }
    }

    /// Encodes the canvas as PNG with unfiltered rows, so that a decoder has to undo only the
    /// compression.
    fn png(&self) -> Result<Vec<u8>, CommandFailure> {
        let mut out = Vec::new();
        let encoder = PngEncoder::new_with_quality(&mut out, CompressionType::Default, FilterType::NoFilter);
        let sizes = [self.width, self.height].map(|size| size as u32);
        encoder
            .write_image(self.pixels.as_flattened(), sizes[0], sizes[1], image::ExtendedColorType::Rgb8)
            .map_err(|error| CommandFailure::failed(format!("cannot draw a picture: {error}")))?;
        Ok(out)
    }
}

/// Draws a grey street with people (red), vehicles (blue) and plants (green).
pub(super) fn street(people: usize, vehicles: usize) -> Result<Vec<u8>, CommandFailure> {
    let mut canvas = Canvas::new(PICTURE, GREY);
    canvas.scatter(CROP_SIDE, (0, people), RED);
    canvas.scatter(CROP_SIDE, (people, vehicles), BLUE);
    canvas.scatter(CROP_SIDE, (people + vehicles, 20), GREEN);
    canvas.png()
}

/// Draws frames with faces (yellow), as concatenated PNGs.
pub(super) fn video() -> Result<Vec<u8>, CommandFailure> {
    let mut frames = Vec::new();
    for (number, faces) in FACES.into_iter().enumerate() {
        let mut canvas = Canvas::new(VIEW, GREY);
        canvas.scatter(CELL_SIDE, (7 * number % (CELLS.0 * CELLS.1), faces), YELLOW);
        frames.extend(canvas.png()?);
    }
    Ok(frames)
}

pub(super) fn photo() -> Result<Vec<u8>, CommandFailure> {
    let mut canvas = Canvas::new((PHOTO_SIDE, PHOTO_SIDE), GREY);
    for (from, colour) in [RED, GREEN, BLUE, YELLOW].into_iter().enumerate() {
        canvas.scatter(CROP_SIDE, (from * 20, 20), colour);
    }
    canvas.png()
}

/// Draws a white line with up to `characters` black strokes, one per column.
pub(super) fn post(characters: usize) -> Result<Vec<u8>, CommandFailure> {
    let height = 2 * LINE.0;
    let width = 2 * LINE.1;
    let mut canvas = Canvas::new((height, width), WHITE);
    for column in 0..characters.min(LINE.1 / COLUMN) {
        let tall = height / 4 + column * 37 % (height / 4);
        canvas.fill((height / 4, 2 * COLUMN * column + 8), (tall, COLUMN), BLACK);
    }
    canvas.png()
}

/// Returns the comments' tokens as INT64.
pub(super) fn comments() -> Vec<u8> {
    let (count, length) = COMMENTS;
    (0..count * length).flat_map(|at| ((at * 7919 % VOCABULARY) as i64).to_le_bytes()).collect()
}
