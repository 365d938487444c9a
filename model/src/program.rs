//! What a program is, as it travels: the file that its owner wrote, an executable or a script, and
//! before it what it takes and gives, so that its digest stands for both. Pure.
//!
//! ```text
//! MILLRACE PROGRAM 1\n │ length of the declaration, u32 LE │ declaration (protobuf) │ the file
//! ```
//! The version in the first line is raised with the layout: an older build says that it knows no such
//! program, and never takes it for something else.

use std::collections::BTreeSet;

use bytes::Bytes;
use millrace_types::workflow::Signature;
use millrace_types::{DataType, Dim, TensorSpec};
use prost::Message as _;

use crate::signature::MAX_TENSORS;
use crate::wire;

/// How a program begins.
const MAGIC: &[u8] = b"MILLRACE PROGRAM 1\n";
/// How any version of one does.
const ANY_VERSION: &[u8] = b"MILLRACE PROGRAM ";
const LENGTH: usize = size_of::<u32>();
/// The longest declaration.
const DECLARATION_BYTES_MAX: usize = 1 << 20;
/// The most dimensions of a tensor.
const RANK_MAX: usize = 16;
/// Fields of one declared tensor: its name, its datatype and its sizes.
const TENSOR_FIELDS_MAX: usize = 2 + RANK_MAX;

/// Bytes that are no program we can run, and what to do about it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProgramError {
    /// Another layout.
    #[error("the program was packed by another version: apply it with this version's millrace")]
    Version,
    /// Cut off, or not what it says it is.
    #[error("the program's declaration is damaged: apply it again")]
    Damaged,
    /// The file is nothing that can be started.
    #[error(
        "the program is neither an executable for Linux nor a script: begin a script with #! and its interpreter, such as #!/usr/bin/env python3"
    )]
    NotExecutable,
    /// It takes or gives nothing, or too much.
    #[error("the program declares {count} {what}: declare 1 to {MAX_TENSORS}")]
    Count {
        /// Inputs or outputs.
        what: &'static str,
        /// How many.
        count: usize,
    },
    /// A name that is none, or is there twice.
    #[error("{what} {name:?} is declared twice, or has no name: give each a name of its own")]
    Name {
        /// Inputs or outputs.
        what: &'static str,
        /// The name.
        name: String,
    },
    /// A type that a program cannot have.
    #[error("{name:?} has datatype {datatype:?}: declare one of a fixed size, such as UINT8 for bytes")]
    DataType {
        /// The tensor.
        name: String,
        /// Its type.
        datatype: String,
    },
    /// A shape that is none.
    #[error("{name:?} has a shape that cannot be: give 1 to {RANK_MAX} sizes, each from 1 or free")]
    Shape {
        /// The tensor.
        name: String,
    },
}

/// A program, opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program {
    /// What it takes and gives.
    pub declared: Signature,
    /// The file to run.
    pub file: Bytes,
}

/// Whether these bytes are a program and not a model, of this version or another.
#[must_use]
pub fn is_program(bytes: &[u8]) -> bool {
    bytes.starts_with(ANY_VERSION)
}

impl Program {
    /// A program's bytes as they travel.
    ///
    /// # Errors
    /// [`ProgramError`] where nobody could run it.
    pub fn pack(&self) -> Result<Bytes, ProgramError> {
        check(&self.declared)?;
        check_file(&self.file)?;
        let Signature { inputs, outputs } = &self.declared;
        let wire = |specs: &[TensorSpec]| specs.iter().map(tensor_wire).collect();
        let declaration = Declaration { inputs: wire(inputs), outputs: wire(outputs) }.encode_to_vec();
        let length = u32::try_from(declaration.len()).map_err(|_| ProgramError::Damaged)?;
        Ok([MAGIC, &length.to_le_bytes(), &declaration, &self.file].concat().into())
    }

    /// Opens what [`Self::pack`] made. The file shares the buffer.
    ///
    /// # Errors
    /// [`ProgramError`].
    pub fn unpack(bytes: &Bytes) -> Result<Self, ProgramError> {
        if !bytes.starts_with(MAGIC) {
            return Err(ProgramError::Version);
        }
        let rest = bytes.slice(MAGIC.len()..);
        let length = *rest.first_chunk::<LENGTH>().ok_or(ProgramError::Damaged)?;
        let length = u32::from_le_bytes(length) as usize;
        if length > DECLARATION_BYTES_MAX || length > rest.len() - LENGTH {
            return Err(ProgramError::Damaged);
        }
        let declaration = rest.slice(LENGTH..LENGTH + length);
        // Before it is decoded: two bytes of it are a whole tensor in memory.
        if !wire::has_at_most(2 * MAX_TENSORS, TENSOR_FIELDS_MAX, &declaration) {
            return Err(ProgramError::Damaged);
        }
        let declaration = Declaration::decode(declaration);
        let Declaration { inputs, outputs } = declaration.map_err(|_| ProgramError::Damaged)?;
        let read = |tensors: Vec<Tensor>| tensors.into_iter().map(tensor).collect::<Result<_, _>>();
        let declared = Signature { inputs: read(inputs)?, outputs: read(outputs)? };
        check(&declared)?;
        let file = rest.slice(LENGTH + length..);
        check_file(&file)?;
        Ok(Self { declared, file })
    }
}

fn check(declared: &Signature) -> Result<(), ProgramError> {
    for (what, specs) in [("input", &declared.inputs), ("output", &declared.outputs)] {
        if !(1..=MAX_TENSORS).contains(&specs.len()) {
            let what = if what == "input" { "inputs" } else { "outputs" };
            return Err(ProgramError::Count { what, count: specs.len() });
        }
        let mut seen = BTreeSet::new();
        for TensorSpec { name, datatype, shape } in specs {
            if name.is_empty() || !seen.insert(name) {
                return Err(ProgramError::Name { what, name: name.clone() });
            }
            if *datatype == DataType::Bytes {
                let (name, datatype) = (name.clone(), datatype.to_string());
                return Err(ProgramError::DataType { name, datatype });
            }
            if !(1..=RANK_MAX).contains(&shape.len()) || shape.contains(&Dim::Fixed(0)) {
                return Err(ProgramError::Shape { name: name.clone() });
            }
        }
    }
    Ok(())
}

fn check_file(file: &[u8]) -> Result<(), ProgramError> {
    if file.starts_with(b"#!") || file.starts_with(b"\x7fELF") {
        return Ok(());
    }
    Err(ProgramError::NotExecutable)
}

#[derive(Clone, PartialEq, prost::Message)]
struct Declaration {
    #[prost(message, repeated, tag = "1")]
    inputs: Vec<Tensor>,
    #[prost(message, repeated, tag = "2")]
    outputs: Vec<Tensor>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Tensor {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, tag = "2")]
    datatype: String,
    #[prost(message, repeated, tag = "3")]
    shape: Vec<Size>,
}

/// Free where it has a symbol.
#[derive(Clone, PartialEq, prost::Message)]
struct Size {
    #[prost(uint64, tag = "1")]
    fixed: u64,
    #[prost(string, tag = "2")]
    symbol: String,
}

fn tensor_wire(TensorSpec { name, datatype, shape }: &TensorSpec) -> Tensor {
    let size = |dim: &Dim| match dim {
        Dim::Fixed(fixed) => Size { fixed: *fixed, symbol: String::new() },
        Dim::Symbol(symbol) => Size { fixed: 0, symbol: symbol.clone() },
    };
    Tensor { name: name.clone(), datatype: datatype.to_string(), shape: shape.iter().map(size).collect() }
}

fn tensor(Tensor { name, datatype, shape }: Tensor) -> Result<TensorSpec, ProgramError> {
    let Ok(known) = datatype.parse() else { return Err(ProgramError::DataType { name, datatype }) };
    let dim = |size: Size| match size.symbol.is_empty() {
        true => Dim::Fixed(size.fixed),
        false => Dim::Symbol(size.symbol),
    };
    Ok(TensorSpec { name, datatype: known, shape: shape.into_iter().map(dim).collect() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn spec(name: &str, datatype: DataType, shape: &[Dim]) -> TensorSpec {
        TensorSpec { name: name.into(), datatype, shape: shape.to_vec() }
    }

    fn program() -> Program {
        let free = [Dim::Symbol("N".into()), Dim::Fixed(64)];
        let declared = Signature {
            inputs: vec![spec("jpeg", DataType::Uint8, &free[..1])],
            outputs: vec![spec("pixels", DataType::Fp32, &free)],
        };
        Program { declared, file: Bytes::from_static(b"#!/bin/sh\n") }
    }

    #[test]
    fn comes_back_as_it_was_packed() {
        let packed = program().pack().unwrap();
        assert!(is_program(&packed));
        assert_eq!(Program::unpack(&packed), Ok(program()));
        let mut newer = packed.to_vec();
        newer[MAGIC.len() - 2] = b'2';
        assert!(is_program(&newer));
        assert_eq!(Program::unpack(&newer.into()), Err(ProgramError::Version));
    }

    #[test]
    fn a_declaration_of_many_empty_tensors_is_refused_before_it_is_decoded() {
        let packed = |declaration: &[u8]| {
            let length = u32::try_from(declaration.len()).unwrap().to_le_bytes();
            Program::unpack(&[MAGIC, &length, declaration, b"#!/bin/sh\n"].concat().into())
        };
        assert_eq!(packed(&[0x0a, 0].repeat(DECLARATION_BYTES_MAX / 2)), Err(ProgramError::Damaged));
        let sizes = [0x1a, 0].repeat(TENSOR_FIELDS_MAX + 1);
        let tensor = [&[0x0a, sizes.len() as u8][..], &sizes].concat();
        assert_eq!(packed(&tensor), Err(ProgramError::Damaged));
    }

    #[test]
    fn refuses_what_nobody_could_run() {
        let check = |change: &dyn Fn(&mut Program)| {
            let mut program = program();
            change(&mut program);
            program.pack().unwrap_err()
        };
        let none = check(&|it| it.declared.inputs.clear());
        assert_eq!(none, ProgramError::Count { what: "inputs", count: 0 });
        let twice = check(&|it| it.declared.outputs.push(it.declared.outputs[0].clone()));
        assert_eq!(twice, ProgramError::Name { what: "output", name: "pixels".into() });
        let bytes = check(&|it| it.declared.inputs[0].datatype = DataType::Bytes);
        assert!(matches!(bytes, ProgramError::DataType { .. }));
        let scalar = check(&|it| it.declared.inputs[0].shape.clear());
        assert_eq!(scalar, ProgramError::Shape { name: "jpeg".into() });
        assert_eq!(check(&|it| it.file = Bytes::from_static(b"print(1)")), ProgramError::NotExecutable);
    }

    proptest! {
        #[test]
        fn damaged_bytes_are_refused_or_still_a_program(at in 0usize..100, byte: u8, cut in 0usize..100) {
            let mut packed = program().pack().unwrap().to_vec();
            let at = at % packed.len();
            packed[at] = byte;
            packed.truncate(packed.len() - cut.min(packed.len()));
            // Whatever comes out could be packed again; nothing panics.
            if let Ok(read) = Program::unpack(&packed.into()) {
                prop_assert!(read.pack().is_ok());
            }
        }
    }
}
