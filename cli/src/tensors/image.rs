//! Converts pictures to the tensor of an image model. The declared shape gives the size, the
//! channels and their order.

use bytes::{BufMut as _, Bytes, BytesMut};
use image::imageops::FilterType;
use image::{DynamicImage, GenericImageView as _};
use millrace_client::{Tensor, TensorMetadata};
use millrace_types::DataType;

use crate::failure::CommandFailure;
use crate::output::text;

/// The order of a picture's numbers in a tensor. A variable dimension takes the picture's own size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Layout {
    order: Order,
    channels: Channels,
    height: Option<u32>,
    width: Option<u32>,
    batch: Batch,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    ChannelsFirst,
    ChannelsLast,
    /// Grey values without a dimension for channels.
    Plane,
    /// Grey values of a square picture in a single dimension.
    Flat,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Channels {
    Grey,
    Rgb,
}

/// Whether the shape has a leading dimension for items.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Batch {
    Dimension,
    None,
}

/// The normalisation of channel values.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Scale {
    /// The mean of each channel, subtracted after scaling to 0..1.
    pub(crate) mean: Vec<f32>,
    /// The divisor of each channel after the subtraction.
    pub(crate) std: Vec<f32>,
}

/// Converts pictures, at least one, to a single tensor.
pub(crate) fn tensor(
    pictures: &[DynamicImage],
    input: &TensorMetadata,
    scale: &Scale,
) -> Result<Tensor, CommandFailure> {
    let layout = Layout::of(&input.shape).ok_or_else(|| not_an_image(input))?;
    check_scale(scale, layout.channels)?;
    let (width, height) = layout.size(pictures)?;
    let mut data = BytesMut::new();
    for picture in pictures {
        let picture = fit(picture, width, height);
        put(&picture, layout, input, scale, &mut data)?;
    }
    let shape = layout.shape(pictures.len(), width, height);
    let shape = super::shape::fit(input, &shape).map_err(|failure| {
        failure.hint("one request cannot hold this many pictures: send them one by one")
    })?;
    Ok(Tensor::new(&input.name, input.datatype, shape, data.freeze())
        .map_err(millrace_client::Error::from)?)
}

/// Decodes a PNG or JPEG file.
pub(crate) fn decode(name: &str, file: &Bytes) -> Result<DynamicImage, CommandFailure> {
    image::load_from_memory(file)
        .map_err(|error| CommandFailure::usage(format!("{name}: {error}")).hint("use a PNG or JPEG file"))
}

fn not_an_image(input: &TensorMetadata) -> CommandFailure {
    let shape = text::shape(&input.shape);
    CommandFailure::usage(format!("{} of shape {shape} is not an image", input.name)).hint(
        "images are [N, 1 or 3, H, W], [N, H, W, 1 or 3], [N, H, W] or a flat square: send other shapes with --raw",
    )
}

impl Layout {
    /// Returns the layout of a declared shape, or `None` if the shape is not an image's.
    fn of(shape: &[i64]) -> Option<Self> {
        let free = |dim: i64| if dim < 0 { Some(None) } else { u32::try_from(dim).ok().map(Some) };
        let channels = |dim: i64| match dim {
            1 => Some(Channels::Grey),
            3 => Some(Channels::Rgb),
            _ => None,
        };
        let layout = |order, channels, height, width, batch| {
            Some(Self { order, channels, height: free(height)?, width: free(width)?, batch })
        };
        match *shape {
            [_, c, h, w] if channels(c).is_some() => {
                layout(Order::ChannelsFirst, channels(c)?, h, w, Batch::Dimension)
            }
            [_, h, w, c] => layout(Order::ChannelsLast, channels(c)?, h, w, Batch::Dimension),
            // A three-dimensional shape is one picture if the first or last dimension is 3.
            // Otherwise a variable or single first dimension is a batch of grey planes.
            [3, h, w] => layout(Order::ChannelsFirst, Channels::Rgb, h, w, Batch::None),
            [h, w, 3] => layout(Order::ChannelsLast, Channels::Rgb, h, w, Batch::None),
            [n, h, w] if n <= 1 => layout(Order::Plane, Channels::Grey, h, w, Batch::Dimension),
            [n, flat] if n <= 1 => {
                let side = u32::try_from(flat).ok()?.isqrt();
                let square = i64::from(side) * i64::from(side) == flat && side > 1;
                let side = i64::from(side);
                square.then(|| layout(Order::Flat, Channels::Grey, side, side, Batch::Dimension))?
            }
            [h, w] => layout(Order::Plane, Channels::Grey, h, w, Batch::None),
            _ => None,
        }
    }

    /// Returns the width and height to which all pictures are resized.
    fn size(self, pictures: &[DynamicImage]) -> Result<(u32, u32), CommandFailure> {
        let first = pictures
            .first()
            .ok_or_else(|| CommandFailure::usage("no picture is given: name at least one"))?;
        let own = first.dimensions();
        Ok((self.width.unwrap_or(own.0), self.height.unwrap_or(own.1)))
    }

    fn shape(self, count: usize, width: u32, height: u32) -> Vec<i64> {
        let h = i64::from(height);
        let w = i64::from(width);
        let c = match self.channels {
            Channels::Grey => 1,
            Channels::Rgb => 3,
        };
        let one = match self.order {
            Order::ChannelsFirst => vec![c, h, w],
            Order::ChannelsLast => vec![h, w, c],
            Order::Plane => vec![h, w],
            Order::Flat => vec![h * w],
        };
        match self.batch {
            Batch::Dimension => {
                std::iter::once(i64::try_from(count).unwrap_or(i64::MAX)).chain(one).collect()
            }
            // Without a batch dimension, several pictures cannot fit, and the shape check reports
            // it.
            Batch::None if count == 1 => one,
            Batch::None => [vec![i64::try_from(count).unwrap_or(i64::MAX)], one].concat(),
        }
    }
}

fn check_scale(scale: &Scale, channels: Channels) -> Result<(), CommandFailure> {
    let count = match channels {
        Channels::Grey => 1,
        Channels::Rgb => 3,
    };
    for (flag, values) in [("--mean", &scale.mean), ("--std", &scale.std)] {
        if values.len() != 1 && values.len() != count {
            return Err(CommandFailure::usage(format!(
                "{flag} has {} values, but the model has {count} channels",
                values.len()
            ))
            .hint("write one value for all channels, or one for each"));
        }
    }
    if scale.std.iter().any(|&std| std == 0.0 || !std.is_finite()) {
        return Err(CommandFailure::usage("--std is zero or not finite: write divisors other than zero"));
    }
    Ok(())
}

fn fit(picture: &DynamicImage, width: u32, height: u32) -> DynamicImage {
    if picture.dimensions() == (width, height) {
        return picture.clone();
    }
    picture.resize_exact(width, height, FilterType::Triangle)
}

fn put(
    picture: &DynamicImage,
    layout: Layout,
    input: &TensorMetadata,
    scale: &Scale,
    data: &mut BytesMut,
) -> Result<(), CommandFailure> {
    let channels = match layout.channels {
        Channels::Grey => 1,
        Channels::Rgb => 3,
    };
    // The bytes are in pixel order, with a pixel's channels side by side.
    let values: Vec<u8> = match layout.channels {
        Channels::Grey => picture.to_luma8().into_raw(),
        Channels::Rgb => picture.to_rgb8().into_raw(),
    };
    let order: Vec<usize> = match layout.order {
        Order::ChannelsFirst => {
            (0..channels).flat_map(|channel| (channel..values.len()).step_by(channels)).collect()
        }
        Order::ChannelsLast | Order::Plane | Order::Flat => (0..values.len()).collect(),
    };
    let of = |list: &[f32], channel: usize| list.get(channel).or(list.first()).copied().unwrap_or(0.0);
    for at in order {
        let channel = at % channels;
        let scaled = (f32::from(values[at]) / 255.0 - of(&scale.mean, channel)) / of(&scale.std, channel);
        match input.datatype {
            DataType::Uint8 => data.put_u8(values[at]),
            DataType::Fp32 => data.put_f32_le(scaled),
            DataType::Fp64 => data.put_f64_le(scaled.into()),
            other => {
                return Err(CommandFailure::usage(format!(
                    "{} has type {other}, and pictures cannot be converted to it",
                    input.name
                ))
                .hint("pictures convert to FP32, FP64 or UINT8: send other types with --raw"));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use image::{GrayImage, RgbImage};

    fn plain() -> Scale {
        Scale { mean: vec![0.0], std: vec![1.0] }
    }

    fn input(datatype: DataType, shape: &[i64]) -> TensorMetadata {
        TensorMetadata { name: "x".into(), datatype, shape: shape.to_vec() }
    }

    fn grey() -> DynamicImage {
        GrayImage::from_raw(2, 2, vec![0, 51, 102, 255]).unwrap().into()
    }

    /// Returns a picture with a red and a blue pixel.
    fn colours() -> DynamicImage {
        RgbImage::from_raw(2, 1, vec![255, 0, 0, 0, 0, 255]).unwrap().into()
    }

    fn floats(pictures: &[DynamicImage], shape: &[i64], scale: &Scale) -> (Vec<i64>, Vec<f32>) {
        let tensor = tensor(pictures, &input(DataType::Fp32, shape), scale).unwrap();
        (tensor.shape().to_vec(), tensor.to_f32().unwrap())
    }

    #[test]
    fn grey_pictures_fill_every_grey_layout() {
        let values = vec![0.0, 0.2, 0.4, 1.0];
        for (declared, shape) in [
            (&[-1, 1, 2, 2][..], vec![1, 1, 2, 2]),
            (&[1, 2, 2, 1], vec![1, 2, 2, 1]),
            (&[-1, 2, 2], vec![1, 2, 2]),
            (&[-1, 4], vec![1, 4]),
            (&[2, 2], vec![2, 2]),
            (&[-1, 1, -1, -1], vec![1, 1, 2, 2]),
        ] {
            assert_eq!(floats(&[grey()], declared, &plain()), (shape, values.clone()), "{declared:?}");
        }
    }

    #[test]
    fn channels_come_first_or_last_as_declared() {
        let first = floats(&[colours()], &[-1, 3, 1, 2], &plain());
        assert_eq!(first, (vec![1, 3, 1, 2], vec![1.0, 0.0, 0.0, 0.0, 0.0, 1.0]));
        let last = floats(&[colours().rotate90()], &[-1, 2, 1, 3], &plain());
        assert_eq!(last, (vec![1, 2, 1, 3], vec![1.0, 0.0, 0.0, 0.0, 0.0, 1.0]));
    }

    #[test]
    fn each_channel_has_its_own_mean_and_deviation() {
        let scale = Scale { mean: vec![0.5, 0.0, 0.5], std: vec![0.5, 1.0, 0.25] };
        let (_, values) = floats(&[colours()], &[3, 1, 2], &scale);
        assert_eq!(values, [1.0, -1.0, 0.0, 0.0, -2.0, 2.0]);
        let two = Scale { mean: vec![0.0, 0.0], std: vec![1.0] };
        assert!(tensor(&[colours()], &input(DataType::Fp32, &[3, 1, 2]), &two).is_err());
        let zero = Scale { mean: vec![0.0], std: vec![0.0] };
        assert!(tensor(&[colours()], &input(DataType::Fp32, &[3, 1, 2]), &zero).is_err());
    }

    #[test]
    fn pictures_are_resized_and_stacked() {
        let (shape, values) = floats(&[grey(), grey()], &[-1, 1, 2, 2], &plain());
        assert_eq!((shape, values.len()), (vec![2, 1, 2, 2], 8));
        let (shape, _) = floats(&[grey()], &[-1, 3, 8, 4], &plain());
        assert_eq!(shape, [1, 3, 8, 4]);
        assert!(tensor(&[grey(), grey()], &input(DataType::Fp32, &[1, 1, 2, 2]), &plain()).is_err());
        assert!(tensor(&[grey(), grey()], &input(DataType::Fp32, &[2, 2]), &plain()).is_err());
    }

    #[test]
    fn bytes_stay_bytes_and_other_types_are_refused() {
        let bytes = tensor(&[grey()], &input(DataType::Uint8, &[-1, 4]), &plain()).unwrap();
        assert_eq!(bytes.data(), [0u8, 51, 102, 255].as_slice());
        assert!(tensor(&[grey()], &input(DataType::Int64, &[-1, 4]), &plain()).is_err());
    }

    #[test]
    fn shapes_of_no_image_are_refused() {
        for shape in [&[][..], &[-1], &[-1, 63], &[-1, 2, 8, 8], &[-1, -1], &[1, 1, 1, 1, 1], &[8, 8, 8]] {
            let failure = tensor(&[grey()], &input(DataType::Fp32, shape), &plain()).unwrap_err();
            assert!(failure.message.unwrap().contains("is not an image"), "{shape:?}");
        }
        assert!(decode("x.png", &Bytes::from_static(b"not a picture")).is_err());
    }
}
