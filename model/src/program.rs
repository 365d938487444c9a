//! The packed format of a program: its declared inputs and outputs, followed by the owner's file, an
//! executable or a script. The digest of a packed program therefore covers both. Pure code.
//!
//! ```text
//! MILLRACE PROGRAM 1\n │ length of the declaration, u32 LE │ declaration (protobuf) │ the file
//! ```
//! The version in the first line changes with the layout, so an older build refuses a newer program
//! with a clear message and never takes it for another kind of file.

use std::collections::BTreeSet;

use bytes::Bytes;
use millrace_types::workflow::Signature;
use millrace_types::{DataType, Dim, TensorSpec};
use prost::Message as _;

use crate::signature::MAX_TENSORS;
use crate::wire;

/// First bytes of a packed program of this version.
const MAGIC: &[u8] = b"MILLRACE PROGRAM 1\n";
/// First bytes of a packed program of any version.
const ANY_VERSION: &[u8] = b"MILLRACE PROGRAM ";
const LENGTH: usize = size_of::<u32>();
/// Longest declaration in bytes.
const DECLARATION_BYTES_MAX: usize = 1 << 20;
/// Most dimensions of a tensor.
const RANK_MAX: usize = 16;
/// Most fields of a declared tensor: its name, its datatype and its dimensions.
const TENSOR_FIELDS_MAX: usize = 2 + RANK_MAX;

/// A reason why bytes are no program that can run, with its remedy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProgramError {
    /// The program has the layout of another version.
    #[error("the program was packed by another version: apply it with this version's millrace")]
    Version,
    /// The program is cut off, or its declaration cannot be decoded.
    #[error("the program's declaration is damaged: apply it again")]
    Damaged,
    /// The file is neither an executable nor a script.
    #[error(
        "the program is neither an executable for Linux nor a script: begin a script with #! and its interpreter, such as #!/usr/bin/env python3"
    )]
    NotExecutable,
    /// The program declares no inputs or outputs, or too many.
    #[error("the program declares {count} {what}: declare 1 to {MAX_TENSORS}")]
    Count {
        /// `"inputs"` or `"outputs"`.
        what: &'static str,
        /// Number of declared tensors.
        count: usize,
    },
    /// A tensor has no name, or the name of another tensor.
    #[error("{what} {name:?} is declared twice, or has no name: give each a name of its own")]
    Name {
        /// `"input"` or `"output"`.
        what: &'static str,
        name: String,
    },
    /// A program cannot have a tensor of this datatype.
    #[error("{name:?} has datatype {datatype:?}: declare one of a fixed size, such as UINT8 for bytes")]
    DataType {
        /// Name of the tensor.
        name: String,
        datatype: String,
    },
    /// A tensor's declared shape is invalid.
    #[error("{name:?} has an invalid shape: declare 1 to {RANK_MAX} dimensions, each from 1 or free")]
    Shape {
        /// Name of the tensor.
        name: String,
    },
}

/// An unpacked program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackedProgram {
    /// Declared inputs and outputs.
    pub signature: Signature,
    /// File to run.
    pub file: Bytes,
}

/// Whether these bytes are a program of any version, and not a model.
#[must_use]
pub fn is_program(bytes: &[u8]) -> bool {
    bytes.starts_with(ANY_VERSION)
}

impl PackedProgram {
    /// Returns the program in its packed format.
    ///
    /// # Errors
    /// Returns a [`ProgramError`] if the program could not run.
    pub fn pack(&self) -> Result<Bytes, ProgramError> {
        check(&self.signature)?;
        check_file(&self.file)?;
        let Signature { inputs, outputs } = &self.signature;
        let wire = |specs: &[TensorSpec]| specs.iter().map(tensor_wire).collect();
        let declaration = Declaration { inputs: wire(inputs), outputs: wire(outputs) }.encode_to_vec();
        let length = u32::try_from(declaration.len()).map_err(|_| ProgramError::Damaged)?;
        Ok([MAGIC, &length.to_le_bytes(), &declaration, &self.file].concat().into())
    }

    /// Unpacks the bytes that [`Self::pack`] returned. The file shares the buffer with `bytes`.
    ///
    /// # Errors
    /// Returns a [`ProgramError`] if the bytes are no valid program.
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
        // Checked before decoding: two bytes of the declaration can decode to a whole tensor in memory.
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
        Ok(Self { signature: declared, file })
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
                let name = name.clone();
                let datatype = datatype.to_string();
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

/// A declared dimension: free if it has a symbol, and fixed otherwise.
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

    fn program() -> PackedProgram {
        let free = [Dim::Symbol("N".into()), Dim::Fixed(64)];
        let declared = Signature {
            inputs: vec![spec("jpeg", DataType::Uint8, &free[..1])],
            outputs: vec![spec("pixels", DataType::Fp32, &free)],
        };
        PackedProgram { signature: declared, file: Bytes::from_static(b"#!/bin/sh\n") }
    }

    #[test]
    fn a_packed_program_unpacks_unchanged() {
        let packed = program().pack().unwrap();
        assert!(is_program(&packed));
        assert_eq!(PackedProgram::unpack(&packed), Ok(program()));
        let mut newer = packed.to_vec();
        newer[MAGIC.len() - 2] = b'2';
        assert!(is_program(&newer));
        assert_eq!(PackedProgram::unpack(&newer.into()), Err(ProgramError::Version));
    }

    #[test]
    fn a_declaration_of_many_empty_tensors_is_refused_before_it_is_decoded() {
        let packed = |declaration: &[u8]| {
            let length = u32::try_from(declaration.len()).unwrap().to_le_bytes();
            PackedProgram::unpack(&[MAGIC, &length, declaration, b"#!/bin/sh\n"].concat().into())
        };
        assert_eq!(packed(&[0x0a, 0].repeat(DECLARATION_BYTES_MAX / 2)), Err(ProgramError::Damaged));
        let sizes = [0x1a, 0].repeat(TENSOR_FIELDS_MAX + 1);
        let tensor = [&[0x0a, sizes.len() as u8][..], &sizes].concat();
        assert_eq!(packed(&tensor), Err(ProgramError::Damaged));
    }

    #[test]
    fn programs_that_could_not_run_are_refused() {
        let check = |change: &dyn Fn(&mut PackedProgram)| {
            let mut program = program();
            change(&mut program);
            program.pack().unwrap_err()
        };
        let none = check(&|it| it.signature.inputs.clear());
        assert_eq!(none, ProgramError::Count { what: "inputs", count: 0 });
        let twice = check(&|it| it.signature.outputs.push(it.signature.outputs[0].clone()));
        assert_eq!(twice, ProgramError::Name { what: "output", name: "pixels".into() });
        let bytes = check(&|it| it.signature.inputs[0].datatype = DataType::Bytes);
        assert!(matches!(bytes, ProgramError::DataType { .. }));
        let scalar = check(&|it| it.signature.inputs[0].shape.clear());
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
            // Damaged bytes never cause a panic, and an unpacked program can be packed again.
            if let Ok(read) = PackedProgram::unpack(&packed.into()) {
                prop_assert!(read.pack().is_ok());
            }
        }
    }
}
