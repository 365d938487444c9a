//! Checks a workflow against the functions that it runs: every input of every step has a source
//! with the right type and a fitting shape. The result is the signature of the whole workflow.
//!
//! **Tensors that may be empty.** Inputs of the workflow never are, because clients must not send a
//! dimension below 1. An output of a step may be empty in two cases. First, its shape has a symbol
//! that no input of the function has, so that its size is unknown. Second, the step is *uncertain*:
//! it has `each` or `when`, or an input that may be empty. An uncertain step may produce no rows,
//! or the rows of all its runs together, so the outputs get a first dimension of their own.
//!
//! Nested workflows follow the same rule because a symbol of a function stands for the dimension of
//! the actual input: in a chain that keeps its batch dimension, output and input have the same
//! symbol.

use std::collections::BTreeMap;

use super::{INPUT, Step, StepTarget, TensorSource, WorkflowSpec};
use crate::ids::FunctionName;
use crate::signature::{Signature, SignatureRef};
use crate::tensor::{DataType, Dim, TensorSpec, shape_text};

/// The fault of a workflow in view of the functions that it runs. Each message names the edge.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CheckError {
    /// The function or workflow does not exist.
    #[error("step \"{step}\" runs {run}, which does not exist: apply it first")]
    UnknownRun {
        /// The name of the step.
        step: FunctionName,
        /// The function or workflow that the step runs.
        run: StepTarget,
    },
    /// The function or workflow has no such input or output.
    #[error("step \"{step}\": {run} has no {what} {name:?}: it has {known}")]
    UnknownTensor {
        /// The name of the step.
        step: FunctionName,
        /// The function or workflow that the step runs.
        run: StepTarget,
        /// The kind of the tensor: "input" or "output".
        what: &'static str,
        /// The name that the spec uses.
        name: String,
        /// The names that the function or workflow has.
        known: String,
    },
    /// An input of a step has no source.
    #[error("step \"{step}\": input {:?} of {run} has no source: give it {} of shape {}", .input.name, .input.datatype, shape_text(&.input.shape))]
    MissingInput {
        /// The name of the step.
        step: FunctionName,
        /// The function or workflow that the step runs.
        run: StepTarget,
        /// The declaration of the input.
        input: TensorSpec,
    },
    /// The element types at the two ends of an edge differ.
    #[error("{from} is {found}, but input {input:?} of step \"{step}\" takes {expected}")]
    DataType {
        /// The source of the edge.
        from: TensorSource,
        /// The element type of the source.
        found: DataType,
        /// The step that reads the source.
        step: FunctionName,
        /// The input of the step.
        input: String,
        /// The element type of the input.
        expected: DataType,
    },
    /// The shapes at the two ends of an edge can never match.
    #[error("{from} has shape {found}{}, but input {input:?} of step \"{step}\" takes {expected}", if *.by_rows { " and is passed row by row" } else { "" })]
    Shape {
        /// The source of the edge.
        from: TensorSource,
        /// The shape of the source.
        found: Box<str>,
        /// Whether the step reads the source row by row.
        by_rows: bool,
        /// The step that reads the source.
        step: FunctionName,
        /// The input of the step.
        input: Box<str>,
        /// The shape of the input.
        expected: Box<str>,
    },
    /// The output is a scalar, which can neither be joined by rows nor be empty.
    #[error(
        "output {output:?} of step \"{step}\" is a scalar: a step with each, with when, or with an input that may be empty needs outputs with a first dimension"
    )]
    Scalar {
        /// The name of the step.
        step: FunctionName,
        /// The name of the output.
        output: String,
    },
}

/// A tensor on an edge of a workflow.
#[derive(Debug, Clone)]
struct TensorFlow {
    datatype: DataType,
    shape: Vec<Dim>,
    may_be_empty: bool,
}

/// The dimensions that a function's symbols stand for, given the actual inputs.
type SymbolBindings = BTreeMap<String, Dim>;

impl WorkflowSpec {
    /// Checks every edge against the functions at its ends, and returns the workflow's inputs and
    /// outputs. Requires a prior [`Self::validate`], because this function trusts the graph.
    ///
    /// # Errors
    /// The first [`CheckError`] found.
    pub fn check<'a, P: Into<SignatureRef<'a>>>(
        &self,
        ports: impl Fn(&StepTarget) -> Option<P>,
    ) -> Result<Signature, CheckError> {
        let mut check = SignatureCheck {
            spec: self,
            inputs: BTreeMap::new(),
            made: BTreeMap::new(),
            fixed: BTreeMap::new(),
        };
        for step in self.in_order() {
            let unknown = || CheckError::UnknownRun { step: step.name.clone(), run: step.run.clone() };
            check.step(step, ports(&step.run).ok_or_else(unknown)?.into())?;
        }
        check.signature()
    }
}

struct SignatureCheck<'a> {
    spec: &'a WorkflowSpec,
    /// The type and shape of each workflow input, inferred from the steps that read it.
    inputs: BTreeMap<String, TensorFlow>,
    made: BTreeMap<(FunctionName, String), TensorFlow>,
    /// Symbols that a step fixes to a number by reading a workflow input with that size.
    fixed: BTreeMap<String, Dim>,
}

impl SignatureCheck<'_> {
    fn step(&mut self, step: &Step, of: SignatureRef<'_>) -> Result<(), CheckError> {
        for name in step.inputs.keys() {
            find(step, "input", name, of.inputs)?;
        }
        let mut bound = SymbolBindings::new();
        for input in of.inputs {
            let missing = || CheckError::MissingInput {
                step: step.name.clone(),
                run: step.run.clone(),
                input: input.clone(),
            };
            let source = step.inputs.get(&input.name).ok_or_else(missing)?;
            self.edge(step, source, input, &mut bound)?;
        }
        if let Some(TensorSource::Step { step: of, output }) = &step.when
            && !self.made.contains_key(&(of.clone(), output.clone()))
        {
            return Err(self.no_such_output(of, output));
        }
        let is_uncertain = self.is_uncertain(step);
        for output in of.outputs {
            let flow = if is_uncertain { any_rows(step, output)? } else { certain(step, output, &bound) };
            self.made.insert((step.name.clone(), output.name.clone()), flow);
        }
        Ok(())
    }

    fn is_uncertain(&self, step: &Step) -> bool {
        let may_be_empty = step.inputs.values().any(|source| match source {
            TensorSource::Step { step, output } => {
                self.made.get(&(step.clone(), output.clone())).is_some_and(|flow| flow.may_be_empty)
            }
            TensorSource::Input(_) => false,
        });
        step.each.is_some() || step.when.is_some() || may_be_empty
    }

    fn no_such_output(&self, step: &FunctionName, output: &str) -> CheckError {
        let known = self.made.keys().filter(|(of, _)| of == step).map(|(_, output)| output.as_str());
        let run = self.spec.step(step).map(|step| step.run.clone());
        CheckError::UnknownTensor {
            step: step.clone(),
            run: run.unwrap_or_else(|| StepTarget::Function(step.clone())),
            what: "output",
            name: output.to_owned(),
            known: known.collect::<Vec<_>>().join(", "),
        }
    }

    fn edge(
        &mut self,
        step: &Step,
        source: &TensorSource,
        input: &TensorSpec,
        bound: &mut SymbolBindings,
    ) -> Result<(), CheckError> {
        let by_rows = step.each.as_deref() == Some(input.name.as_str());
        let flow = match source {
            TensorSource::Input(name) => {
                let mut shape = own(step, &input.shape);
                if by_rows && let Some(rows) = shape.first_mut() {
                    // No step can be called `input`, so this is not a symbol of a function.
                    *rows = Dim::Symbol(format!("{INPUT}.{name}"));
                }
                let first = TensorFlow { datatype: input.datatype, shape, may_be_empty: false };
                self.inputs.entry(name.clone()).or_insert(first)
            }
            TensorSource::Step { step: of, output } => match self.made.get_mut(&(of.clone(), output.clone()))
            {
                Some(flow) => flow,
                None => return Err(self.no_such_output(of, output)),
            },
        };
        if flow.datatype != input.datatype {
            return Err(CheckError::DataType {
                from: source.clone(),
                found: flow.datatype,
                step: step.name.clone(),
                input: input.name.clone(),
                expected: input.datatype,
            });
        }
        if !fits(&flow.shape, &input.shape, by_rows) {
            return Err(CheckError::Shape {
                from: source.clone(),
                found: shape_text(&flow.shape).into(),
                by_rows,
                step: step.name.clone(),
                input: input.name.as_str().into(),
                expected: shape_text(&input.shape).into(),
            });
        }
        // A workflow input has to satisfy all steps that read it, so a fixed size replaces a free
        // one.
        if matches!(source, TensorSource::Input(_)) {
            for (had, dim) in flow.shape.iter_mut().zip(&input.shape).skip(usize::from(by_rows)) {
                if let (Dim::Symbol(symbol), Dim::Fixed(_)) = (&*had, dim) {
                    self.fixed.insert(symbol.clone(), dim.clone());
                    *had = dim.clone();
                }
            }
        }
        for (given, dim) in flow.shape.iter().zip(&input.shape).skip(usize::from(by_rows)) {
            if let Dim::Symbol(symbol) = dim {
                bound.entry(symbol.clone()).or_insert_with(|| given.clone());
            }
        }
        if by_rows && let Some(Dim::Symbol(symbol)) = input.shape.first() {
            bound.insert(symbol.clone(), Dim::Fixed(1));
        }
        Ok(())
    }

    fn signature(self) -> Result<Signature, CheckError> {
        let spec = |name: &str, flow: &TensorFlow| TensorSpec {
            name: name.to_owned(),
            datatype: flow.datatype,
            shape: flow.shape.iter().map(|dim| self.settled(dim)).collect(),
        };
        let flows = self.spec.inputs.iter().filter_map(|name| Some((name, self.inputs.get(name)?)));
        let inputs = flows.map(|(name, flow)| spec(name, flow)).collect();
        let mut outputs = Vec::with_capacity(self.spec.outputs.len());
        for output in &self.spec.outputs {
            // Skipped: `validate` allows only steps as the source of an output.
            let TensorSource::Step { step, output: made } = &output.from else { continue };
            let flow = self.made.get(&(step.clone(), made.clone()));
            outputs.push(spec(&output.name, flow.ok_or_else(|| self.no_such_output(step, made))?));
        }
        Ok(Signature { inputs, outputs })
    }

    /// Returns a dimension, with the size that later steps fixed for it.
    fn settled(&self, dim: &Dim) -> Dim {
        match dim {
            Dim::Symbol(symbol) => self.fixed.get(symbol).unwrap_or(dim).clone(),
            Dim::Fixed(_) => dim.clone(),
        }
    }
}

/// Returns an output of a step that always runs.
fn certain(step: &Step, output: &TensorSpec, bound: &SymbolBindings) -> TensorFlow {
    let given = |dim: &Dim| match dim {
        Dim::Symbol(symbol) => bound.get(symbol),
        Dim::Fixed(_) => None,
    };
    let unknown = |dim: &Dim| match dim {
        Dim::Symbol(_) => given(dim).is_none(),
        Dim::Fixed(size) => *size == 0,
    };
    let own = own(step, &output.shape);
    let shape = output.shape.iter().zip(own).map(|(dim, own)| given(dim).cloned().unwrap_or(own)).collect();
    TensorFlow { datatype: output.datatype, shape, may_be_empty: output.shape.iter().any(unknown) }
}

/// Returns an output of an uncertain step, which has any number of rows. With no rows, every free
/// dimension of a row is zero too ([`empty_shape`](super::empty_shape)), so the shape shares no
/// symbol with the function's inputs.
fn any_rows(step: &Step, output: &TensorSpec) -> Result<TensorFlow, CheckError> {
    // The name of a step has no colon, so these are not symbols of a function.
    let unlike = |dim: &Dim| match dim {
        Dim::Symbol(name) => Dim::Symbol(format!("{}:{name}", step.name)),
        Dim::Fixed(size) => Dim::Fixed(*size),
    };
    let mut shape: Vec<_> = output.shape.iter().map(unlike).collect();
    let scalar = || CheckError::Scalar { step: step.name.clone(), output: output.name.clone() };
    *shape.first_mut().ok_or_else(scalar)? = Dim::Symbol(format!("{}:rows", step.name));
    Ok(TensorFlow { datatype: output.datatype, shape, may_be_empty: true })
}

/// Returns a shape with the function's symbols qualified by the step, because equal names mean
/// equal sizes only within a function.
fn own(step: &Step, shape: &[Dim]) -> Vec<Dim> {
    let own = |dim: &Dim| match dim {
        Dim::Symbol(name) => Dim::Symbol(format!("{}.{name}", step.name)),
        Dim::Fixed(size) => Dim::Fixed(*size),
    };
    shape.iter().map(own).collect()
}

fn find(step: &Step, what: &'static str, name: &str, known: &[TensorSpec]) -> Result<(), CheckError> {
    if known.iter().any(|tensor| tensor.name == name) {
        return Ok(());
    }
    Err(CheckError::UnknownTensor {
        step: step.name.clone(),
        run: step.run.clone(),
        what,
        name: name.to_owned(),
        known: known.iter().map(|tensor| tensor.name.as_str()).collect::<Vec<_>>().join(", "),
    })
}

/// Returns whether a tensor of shape `found` can be read as `expected`: dimensions that are fixed
/// at both ends are equal. With `by_rows`, a single row has to fit.
fn fits(found: &[Dim], expected: &[Dim], by_rows: bool) -> bool {
    let same = |(found, expected): (&Dim, &Dim)| match (found, expected) {
        (Dim::Fixed(found), Dim::Fixed(expected)) => found == expected,
        _ => true,
    };
    let one = Dim::Fixed(1);
    let rows = if by_rows { Some((&one, expected.first())) } else { None };
    found.len() == expected.len()
        && rows.is_none_or(|(one, expected)| expected.is_some_and(|expected| same((one, expected))))
        && found.iter().zip(expected).skip(usize::from(by_rows)).all(same)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
