//! A function in Rust. The output y is twice the input x, and the caller gets the sum of x.

use millrace_function::{Call, DataType, Error, serve};

fn double(call: &Call) -> Result<(), Error> {
    let input = call.input("x")?;
    let x = call.fetch(&input.id)?;
    let values = x.bytes()?.chunks_exact(4).map(|it| f32::from_le_bytes([it[0], it[1], it[2], it[3]]));

    // The buffer is the object's memory, so storing the object copies no byte.
    let mut y = call.create(x.len())?;
    for (to, value) in y.chunks_exact_mut(4).zip(values.clone()) {
        to.copy_from_slice(&(2.0 * value).to_le_bytes());
    }
    let id = call.unique_id()?;
    call.store(&id, y)?;
    call.output("y", &id, DataType::Fp32, &input.shape)?;

    let mut sum = call.create(4)?;
    sum.copy_from_slice(&values.sum::<f32>().to_le_bytes());
    let id = call.unique_id()?;
    call.store(&id, sum)?;
    call.response("sum", &id, DataType::Fp32, &[1])
}

fn main() -> Result<(), Error> {
    serve(double)
}
