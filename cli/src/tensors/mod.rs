//! The conversion of user input to the tensors of a model. Pure logic: the caller passes the
//! model's declaration.

pub(crate) mod image;
pub(crate) mod json;
pub(crate) mod raw;
pub(crate) mod shape;

use millrace_client::{ModelMetadata, TensorMetadata};

use crate::failure::CommandFailure;

/// Returns the declaration of the input of this name.
pub(crate) fn declared<'a>(
    model: &'a ModelMetadata,
    name: &str,
) -> Result<&'a TensorMetadata, CommandFailure> {
    model.inputs.iter().find(|input| input.name == name).ok_or_else(|| {
        let known: Vec<_> = model.inputs.iter().map(|input| input.name.as_str()).collect();
        CommandFailure::usage(format!("{} has no input {name:?}", model.name))
            .hint(format!("its inputs are: {}", known.join(", ")))
    })
}

/// Returns the only input of a model.
pub(crate) fn only_input(model: &ModelMetadata) -> Result<&TensorMetadata, CommandFailure> {
    match model.inputs.as_slice() {
        [input] => Ok(input),
        inputs => {
            let known: Vec<_> = inputs.iter().map(|input| input.name.as_str()).collect();
            Err(CommandFailure::usage(format!("{} has {} inputs: name the input", model.name, inputs.len()))
                .hint(format!("its inputs are: {}", known.join(", "))))
        }
    }
}

#[cfg(test)]
pub(crate) fn model_of(inputs: &[(&str, millrace_types::DataType, &[i64])]) -> ModelMetadata {
    let input = |&(name, datatype, shape): &(&str, _, &[i64])| TensorMetadata {
        name: name.to_owned(),
        datatype,
        shape: shape.to_vec(),
    };
    ModelMetadata {
        name: "model".into(),
        versions: Vec::new(),
        platform: String::new(),
        inputs: inputs.iter().map(input).collect(),
        outputs: Vec::new(),
    }
}
