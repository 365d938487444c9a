//! Inputs of the example workflows: pictures of coloured squares as PNG, and comments as tokens. The same
//! call draws the same picture.

use image::ImageEncoder as _;
use image::codecs::png::{CompressionType, FilterType, PngEncoder};
use millrace_model::synth::{CELL_SIDE, CELLS, COLUMN, CROP_SIDE, LINE, PHOTO_SIDE, PICTURE, VIEW};

use crate::failure::Failure;

/// Frames of the video.
pub(super) const FRAMES: usize = 6;
/// Faces in each frame: none in the second chunk.
const FACES: [usize; FRAMES] = [2, 1, 0, 0, 1, 1];
/// Comments, and tokens of each.
const COMMENTS: (usize, usize) = (8, 32);
/// Tokens are below this, so that they are in the vocabulary of every network.
const VOCABULARY: usize = 3000;

type Colour = [u8; 3];

const GREY: Colour = [96; 3];
const RED: Colour = [230, 30, 40];
const GREEN: Colour = [30, 200, 40];
const BLUE: Colour = [20, 40, 220];
const YELLOW: Colour = [230, 210, 40];
const WHITE: Colour = [235; 3];
const BLACK: Colour = [20; 3];

/// Pixels, row by row.
struct Canvas {
    height: usize,
    width: usize,
    pixels: Vec<Colour>,
}

impl Canvas {
    /// A plain one with a little noise, the same in all channels.
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

    /// A square in each of the first `count` cells from `from` on, scattered over the picture.
    fn scatter(&mut self, side: usize, (from, count): (usize, usize), colour: Colour) {
        let (rows, across) = (self.height / side, self.width / side);
        for number in from..from + count {
            // 89 is prime to the number of cells: no two are the same.
            let cell = (number * 89 + 31) % (rows * across);
            let corner = (cell / across * side + 2, cell % across * side + 2);
            self.fill(corner, (side - 4, side - 4), colour);
        }
    }

    /// Rows as they are: a reader has nothing to undo but the compression.
    fn png(&self) -> Result<Vec<u8>, Failure> {
        let mut out = Vec::new();
        let encoder = PngEncoder::new_with_quality(&mut out, CompressionType::Default, FilterType::NoFilter);
        let sizes = [self.width, self.height].map(|size| size as u32);
        encoder
            .write_image(self.pixels.as_flattened(), sizes[0], sizes[1], image::ExtendedColorType::Rgb8)
            .map_err(|error| Failure::failed(format!("cannot draw a picture: {error}")))?;
        Ok(out)
    }
}

/// A grey street with people (red), vehicles (blue) and plants (green).
pub(super) fn street(people: usize, vehicles: usize) -> Result<Vec<u8>, Failure> {
    let mut canvas = Canvas::new(PICTURE, GREY);
    canvas.scatter(CROP_SIDE, (0, people), RED);
    canvas.scatter(CROP_SIDE, (people, vehicles), BLUE);
    canvas.scatter(CROP_SIDE, (people + vehicles, 20), GREEN);
    canvas.png()
}

/// Frames with faces (yellow), one PNG after the other.
pub(super) fn video() -> Result<Vec<u8>, Failure> {
    let mut frames = Vec::new();
    for (number, faces) in FACES.into_iter().enumerate() {
        let mut canvas = Canvas::new(VIEW, GREY);
        canvas.scatter(CELL_SIDE, (7 * number % (CELLS.0 * CELLS.1), faces), YELLOW);
        frames.extend(canvas.png()?);
    }
    Ok(frames)
}

pub(super) fn photo() -> Result<Vec<u8>, Failure> {
    let mut canvas = Canvas::new((PHOTO_SIDE, PHOTO_SIDE), GREY);
    for (from, colour) in [RED, GREEN, BLUE, YELLOW].into_iter().enumerate() {
        canvas.scatter(CROP_SIDE, (from * 20, 20), colour);
    }
    canvas.png()
}

/// A white line with so many black strokes, one in a column.
pub(super) fn post(characters: usize) -> Result<Vec<u8>, Failure> {
    let (height, width) = (2 * LINE.0, 2 * LINE.1);
    let mut canvas = Canvas::new((height, width), WHITE);
    for column in 0..characters.min(LINE.1 / COLUMN) {
        let tall = height / 4 + column * 37 % (height / 4);
        canvas.fill((height / 4, 2 * COLUMN * column + 8), (tall, COLUMN), BLACK);
    }
    canvas.png()
}

/// Tokens of comments, INT64.
pub(super) fn comments() -> Vec<u8> {
    let (count, length) = COMMENTS;
    (0..count * length).flat_map(|at| ((at * 7919 % VOCABULARY) as i64).to_le_bytes()).collect()
}
