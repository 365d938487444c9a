//! The first step of the workflow: decodes a JPEG to pixels.

use millrace_function::{Call, DataType, Error, serve};

fn decode(call: &Call) -> Result<(), Error> {
    let jpeg = call.fetch(&call.input("jpeg")?.id)?;
    let picture = image::load_from_memory_with_format(jpeg.bytes()?, image::ImageFormat::Jpeg)
        .map_err(|error| Error::Function(error.to_string()))?
        .into_rgb8();
    let mut pixels = call.create(picture.as_raw().len())?;
    pixels.copy_from_slice(picture.as_raw());
    let id = call.unique_id()?;
    call.store(&id, pixels)?;
    let shape = [i64::from(picture.height()), i64::from(picture.width()), 3];
    call.output("pixels", &id, DataType::Uint8, &shape)
}

fn main() -> Result<(), Error> {
    serve(decode)
}
