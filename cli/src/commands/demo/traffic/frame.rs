//! Frames for the detector of [`millrace_model::synth`]: a grey street with squares, red for people
//! and blue for vehicles, each in a separate patch. Equal seeds draw equal frames.

use bytes::{BufMut as _, BytesMut};
use millrace_client::Tensor;
use millrace_model::synth::{FRAME_SIDE, PATCH_SIDE, PATCHES_ACROSS};

use crate::failure::CommandFailure;

const PIXELS: usize = FRAME_SIDE * FRAME_SIDE;
const CHANNELS: usize = 3;
/// The width of a square in pixels. Even with its stripes, such a square is well above the
/// detector's threshold.
const SIDES: std::ops::Range<usize> = 26..32;
const STREET: [u8; CHANNELS] = [96; CHANNELS];
const MARKING: [u8; CHANNELS] = [200; CHANNELS];

/// A picture of 512 × 512 pixels, red, green and blue, row by row.
#[derive(Debug, Clone)]
pub(super) struct StreetFrame {
    pub(super) people: usize,
    pub(super) vehicles: usize,
    pixels: Vec<[u8; CHANNELS]>,
}

impl StreetFrame {
    /// Draws a frame with these numbers of people and vehicles at random places, at most one in
    /// each of the 256 patches.
    pub(super) fn draw(seed: u64, people: usize, vehicles: usize) -> Self {
        let patches = PATCHES_ACROSS * PATCHES_ACROSS;
        assert!(people + vehicles <= patches, "{people} and {vehicles} do not fit");
        let mut random = Random(seed);
        let mut frame = Self { people, vehicles, pixels: vec![STREET; PIXELS] };
        frame.mark_the_street();
        let mut places: Vec<usize> = (0..patches).collect();
        for number in 0..people + vehicles {
            let place = places.swap_remove(random.below(places.len()));
            let strong = (200 + random.below(56)) as u8;
            let weak = random.below(50) as u8;
            let colour = if number < people { [strong, weak, weak] } else { [weak, weak, strong] };
            frame.put(place, colour, &mut random);
        }
        frame
    }

    fn mark_the_street(&mut self) {
        for (at, pixel) in self.pixels.iter_mut().enumerate() {
            let y = at / FRAME_SIDE;
            let x = at % FRAME_SIDE;
            if y % (4 * PATCH_SIDE) < 4 && x % (2 * PATCH_SIDE) < PATCH_SIDE {
                *pixel = MARKING;
            }
        }
    }

    /// Draws a square with darker stripes, so that no two squares look alike.
    fn put(&mut self, place: usize, colour: [u8; CHANNELS], random: &mut Random) {
        let side = SIDES.start + random.below(SIDES.len());
        let top = place / PATCHES_ACROSS * PATCH_SIDE + random.below(PATCH_SIDE - side);
        let left = place % PATCHES_ACROSS * PATCH_SIDE + random.below(PATCH_SIDE - side);
        let wide = 1 + random.below(5);
        let upright = random.below(2) == 0;
        for y in 0..side {
            for x in 0..side {
                let across = if upright { x } else { y };
                let dark = across / wide % 3 == 2;
                self.pixels[(top + y) * FRAME_SIDE + left + x] =
                    if dark { colour.map(|channel| channel / 3) } else { colour };
            }
        }
    }

    /// Converts the frame to the detector's input: values from 0 to 1, channel by channel.
    pub(super) fn tensor(&self, input: &str) -> Result<Tensor, CommandFailure> {
        let mut data = BytesMut::with_capacity(CHANNELS * PIXELS * size_of::<f32>());
        for channel in 0..CHANNELS {
            for pixel in &self.pixels {
                data.put_f32_le(f32::from(pixel[channel]) / 255.0);
            }
        }
        let shape = [1, CHANNELS, FRAME_SIDE, FRAME_SIDE].map(|dim| dim as i64);
        let tensor = Tensor::new(input, millrace_types::DataType::Fp32, shape.to_vec(), data.freeze());
        Ok(tensor.map_err(millrace_client::Error::from)?)
    }
}

/// A small random generator (xorshift64*), so that a frame depends only on its seed.
struct Random(u64);

impl Random {
    /// Returns a number below a limit that is far below 2^32.
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let bits = self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33;
        bits as usize % limit
    }
}

#[cfg(test)]
mod tests {
    use image::RgbImage;

    use super::super::frames;
    use super::*;

    #[test]
    fn the_examples_picture_is_the_first_frame() {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/traffic/frame.png");
        let [frame, _] = frames();
        let drawn: Vec<u8> = frame.pixels.iter().flatten().copied().collect();
        if std::env::var_os("MILLRACE_DRAW").is_some() {
            RgbImage::from_raw(512, 512, drawn.clone()).unwrap().save(file).unwrap();
        }
        let kept: RgbImage = image::open(file).unwrap().to_rgb8();
        assert_eq!(kept.dimensions(), (FRAME_SIDE as u32, FRAME_SIDE as u32));
        assert!(kept.into_raw() == drawn, "draw it again: MILLRACE_DRAW=1 cargo test -p millrace-cli");
    }

    #[test]
    fn every_square_has_a_patch_of_its_own() {
        let frame = StreetFrame::draw(7, 200, 56);
        let coloured = |patch: usize| {
            let top = patch / PATCHES_ACROSS * PATCH_SIDE;
            let left = patch % PATCHES_ACROSS * PATCH_SIDE;
            let mut rows =
                (top..top + PATCH_SIDE).map(|y| &frame.pixels[y * FRAME_SIDE + left..][..PATCH_SIDE]);
            rows.any(|row| row.iter().any(|[red, _, blue]| red != blue))
        };
        assert!((0..256).all(coloured));
    }
}
