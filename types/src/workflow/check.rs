//! A workflow against the functions it runs: that each input of each is there, of the right type and
//! of a shape that fits, and what the whole takes and gives.
//!
//! **What may be empty.** A workflow's own inputs never are: nobody may send a dimension below 1. What
//! a function makes may be where its shape has a symbol that none of the function's inputs has, so
//! that nothing says how large it is, and where its step is *uncertain*: it runs `each` or `when`, or
//! takes what may be empty. An uncertain step may give no rows, or as many as its runs give together,
//! so that its outputs have a first dimension of their own.
//!
//! For a workflow inside another to keep to the same rule, a symbol of a function stands for what the
//! function is given: of a chain that keeps its batch, output and input have one symbol.

use std::collections::BTreeMap;

use super::{INPUT, Ports, Run, Signature, Source, Step, WorkflowSpec};
use crate::ids::FunctionName;
use crate::tensor::{DataType, Dim, TensorSpec, shape_text};

/// Why a workflow was refused, beside the functions it runs. Each message says which edge.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CheckError {
    /// A function or workflow that does not exist.
    #[error("step \"{step}\" runs {run}, which does not exist: apply it first")]
    UnknownRun {
        /// Which step.
        step: FunctionName,
        /// What it runs.
        run: Run,
    },
    /// A tensor of a step that what it runs has not.
    #[error("step \"{step}\": {run} has no {what} {name:?}: it has {known}")]
    UnknownTensor {
        /// Which step.
        step: FunctionName,
        /// What it runs.
        run: Run,
        /// "input" or "output".
        what: &'static str,
        /// The name asked for.
        name: String,
        /// The names there are.
        known: String,
    },
    /// An input that nothing is given to.
    #[error("step \"{step}\": input {:?} of {run} comes from nowhere: give it {} of shape {}", .input.name, .input.datatype, shape_text(&.input.shape))]
    MissingInput {
        /// Which step.
        step: FunctionName,
        /// What it runs.
        run: Run,
        /// The input.
        input: TensorSpec,
    },
    /// Another element type at the other end.
    #[error("{from} is {found}, and input {input:?} of step \"{step}\" takes {expected}")]
    DataType {
        /// The source.
        from: Source,
        /// Its type.
        found: DataType,
        /// Who takes it.
        step: FunctionName,
        /// As what.
        input: String,
        /// The type it takes.
        expected: DataType,
    },
    /// A shape that can never fit.
    #[error("{from} has shape {found}{}, and input {input:?} of step \"{step}\" takes {expected}", if *.by_rows { " and comes row by row" } else { "" })]
    Shape {
        /// The source.
        from: Source,
        /// Its shape.
        found: Box<str>,
        /// Whether one row at a time is taken.
        by_rows: bool,
        /// Who takes it.
        step: FunctionName,
        /// As what.
        input: Box<str>,
        /// The shape it takes.
        expected: Box<str>,
    },
    /// An output that rows of cannot be joined, or that cannot be empty.
    #[error(
        "output {output:?} of step \"{step}\" is a scalar: a step that runs for each row, or may not run since it has a condition or may be given no rows, needs outputs with a first dimension"
    )]
    Scalar {
        /// Which step.
        step: FunctionName,
        /// Which output.
        output: String,
    },
}

/// A tensor on its way through a workflow.
#[derive(Debug, Clone)]
struct Flow {
    datatype: DataType,
    shape: Vec<Dim>,
    may_be_empty: bool,
}

/// What a function's symbols stand for, by what its inputs are given.
type Bound = BTreeMap<String, Dim>;

impl WorkflowSpec {
    /// Checks every edge against the functions at its ends, and says what the workflow takes and
    /// gives. Call [`Self::validate`] first: this trusts the graph.
    ///
    /// # Errors
    /// The first [`CheckError`] found.
    pub fn check<'a, P: Into<Ports<'a>>>(
        &self,
        ports: impl Fn(&Run) -> Option<P>,
    ) -> Result<Signature, CheckError> {
        let mut check =
            Check { spec: self, inputs: BTreeMap::new(), made: BTreeMap::new(), fixed: BTreeMap::new() };
        for step in self.in_order() {
            let unknown = || CheckError::UnknownRun { step: step.name.clone(), run: step.run.clone() };
            check.step(step, ports(&step.run).ok_or_else(unknown)?.into())?;
        }
        check.signature()
    }
}

struct Check<'a> {
    spec: &'a WorkflowSpec,
    /// What the workflow's inputs turn out to be, by those who take them.
    inputs: BTreeMap<String, Flow>,
    made: BTreeMap<(FunctionName, String), Flow>,
    /// The symbols that turned out to be one number, since somebody takes the workflow's input so.
    fixed: BTreeMap<String, Dim>,
}

impl Check<'_> {
    fn step(&mut self, step: &Step, of: Ports<'_>) -> Result<(), CheckError> {
        for name in step.inputs.keys() {
            find(step, "input", name, of.inputs)?;
        }
        let mut bound = Bound::new();
        for input in of.inputs {
            let missing = || CheckError::MissingInput {
                step: step.name.clone(),
                run: step.run.clone(),
                input: input.clone(),
            };
            let source = step.inputs.get(&input.name).ok_or_else(missing)?;
            self.edge(step, source, input, &mut bound)?;
        }
        if let Some(Source::Step { step: of, output }) = &step.when
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
            Source::Step { step, output } => {
                self.made.get(&(step.clone(), output.clone())).is_some_and(|flow| flow.may_be_empty)
            }
            Source::Input(_) => false,
        });
        step.each.is_some() || step.when.is_some() || may_be_empty
    }

    fn no_such_output(&self, step: &FunctionName, output: &str) -> CheckError {
        let known = self.made.keys().filter(|(of, _)| of == step).map(|(_, output)| output.as_str());
        let run = self.spec.step(step).map(|step| step.run.clone());
        CheckError::UnknownTensor {
            step: step.clone(),
            run: run.unwrap_or_else(|| Run::Function(step.clone())),
            what: "output",
            name: output.to_owned(),
            known: known.collect::<Vec<_>>().join(", "),
        }
    }

    fn edge(
        &mut self,
        step: &Step,
        source: &Source,
        input: &TensorSpec,
        bound: &mut Bound,
    ) -> Result<(), CheckError> {
        let by_rows = step.each.as_deref() == Some(input.name.as_str());
        let flow = match source {
            Source::Input(name) => {
                let mut shape = own(step, &input.shape);
                if by_rows && let Some(rows) = shape.first_mut() {
                    // No step is called so: it is no symbol of a function.
                    *rows = Dim::Symbol(format!("{INPUT}.{name}"));
                }
                let first = Flow { datatype: input.datatype, shape, may_be_empty: false };
                self.inputs.entry(name.clone()).or_insert(first)
            }
            Source::Step { step: of, output } => match self.made.get_mut(&(of.clone(), output.clone())) {
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
        // Whoever sends the workflow's input has to please everybody who takes it.
        if matches!(source, Source::Input(_)) {
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
        let spec = |name: &str, flow: &Flow| TensorSpec {
            name: name.to_owned(),
            datatype: flow.datatype,
            shape: flow.shape.iter().map(|dim| self.settled(dim)).collect(),
        };
        let flows = self.spec.inputs.iter().filter_map(|name| Some((name, self.inputs.get(name)?)));
        let inputs = flows.map(|(name, flow)| spec(name, flow)).collect();
        let mut outputs = Vec::with_capacity(self.spec.outputs.len());
        for output in &self.spec.outputs {
            // `validate` takes outputs from steps alone.
            let Source::Step { step, output: made } = &output.from else { continue };
            let flow = self.made.get(&(step.clone(), made.clone()));
            outputs.push(spec(&output.name, flow.ok_or_else(|| self.no_such_output(step, made))?));
        }
        Ok(Signature { inputs, outputs })
    }

    /// A dimension, with what the steps after its own made of it.
    fn settled(&self, dim: &Dim) -> Dim {
        match dim {
            Dim::Symbol(symbol) => self.fixed.get(symbol).unwrap_or(dim).clone(),
            Dim::Fixed(_) => dim.clone(),
        }
    }
}

/// What a step that surely runs gives.
fn certain(step: &Step, output: &TensorSpec, bound: &Bound) -> Flow {
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
    Flow { datatype: output.datatype, shape, may_be_empty: output.shape.iter().any(unknown) }
}

/// What an uncertain step gives: any number of rows. With none, what is not fixed of a row is zero
/// too ([`empty_shape`](super::empty_shape)), and so has no symbol of the function's inputs.
fn any_rows(step: &Step, output: &TensorSpec) -> Result<Flow, CheckError> {
    // A step's name has no colon: these are no symbols of a function.
    let unlike = |dim: &Dim| match dim {
        Dim::Symbol(name) => Dim::Symbol(format!("{}:{name}", step.name)),
        Dim::Fixed(size) => Dim::Fixed(*size),
    };
    let mut shape: Vec<_> = output.shape.iter().map(unlike).collect();
    let scalar = || CheckError::Scalar { step: step.name.clone(), output: output.name.clone() };
    *shape.first_mut().ok_or_else(scalar)? = Dim::Symbol(format!("{}:rows", step.name));
    Ok(Flow { datatype: output.datatype, shape, may_be_empty: true })
}

/// A function's symbols, told apart from those of others: equal names mean equal numbers within one
/// function alone.
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

/// Whether a tensor of the one shape may be taken as the other: dimensions that are fixed at both
/// ends are equal, and a row that comes alone is taken where one row is.
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
