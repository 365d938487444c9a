//! Shapes: parsed from arguments, declared by models, and completed from data.

use millrace_client::TensorMetadata;

use crate::failure::CommandFailure;

/// Parses a shape such as `1x3x224x224` or `1,64`; `scalar` is the empty shape.
pub(crate) fn parse(text: &str) -> Result<Vec<i64>, String> {
    if text == "scalar" {
        return Ok(Vec::new());
    }
    let dim = |part: &str| match part.trim().parse::<i64>() {
        Ok(dim) if dim >= 0 => Ok(dim),
        _ => Err(format!("{text:?} is not a shape: write dimensions such as 1x3x224x224")),
    };
    text.split(['x', ',']).map(dim).collect()
}

/// Fills the only variable dimension of a declared shape so that the shape has `count` elements.
pub(crate) fn fill(input: &TensorMetadata, count: usize) -> Result<Vec<i64>, CommandFailure> {
    let free = input.shape.iter().filter(|&&dim| dim < 0).count();
    let fixed: i64 = input.shape.iter().filter(|&&dim| dim >= 0).product();
    let count = i64::try_from(count).unwrap_or(i64::MAX);
    let fits = match free {
        0 => count == fixed,
        1 => fixed > 0 && count % fixed == 0 && count > 0,
        _ => {
            return Err(CommandFailure::usage(format!(
                "{}: shape {} has {free} variable dimensions",
                input.name,
                text(input)
            ))
            .hint("write the shape: nested lists in JSON, or --raw NAME=FILE:DTYPE:SHAPE"));
        }
    };
    if !fits {
        let message = format!("{}: {count} values do not fill shape {}", input.name, text(input));
        return Err(CommandFailure::usage(message));
    }
    Ok(input.shape.iter().map(|&dim| if dim < 0 { count / fixed } else { dim }).collect())
}

/// Checks a shape against the declared shape. If the shape lacks only a leading dimension that is
/// variable or 1, adds 1 as a batch of one.
pub(crate) fn fit(input: &TensorMetadata, given: &[i64]) -> Result<Vec<i64>, CommandFailure> {
    let fits = |given: &[i64]| {
        given.len() == input.shape.len()
            && given.iter().zip(&input.shape).all(|(&given, &declared)| declared < 0 || declared == given)
    };
    let batched: Vec<i64> = std::iter::once(1).chain(given.iter().copied()).collect();
    if fits(given) {
        Ok(given.to_vec())
    } else if fits(&batched) {
        Ok(batched)
    } else {
        let given = crate::output::text::shape(given);
        Err(CommandFailure::usage(format!("{}: shape {given} does not fit {}", input.name, text(input)))
            .hint("N may be any number; the other dimensions must match"))
    }
}

fn text(input: &TensorMetadata) -> String {
    crate::output::text::shape(&input.shape)
}

#[cfg(test)]
mod tests {
    use super::*;
    use millrace_types::DataType;

    fn input(shape: &[i64]) -> TensorMetadata {
        TensorMetadata { name: "x".into(), datatype: DataType::Fp32, shape: shape.to_vec() }
    }

    #[test]
    fn shapes_are_written_with_x_or_commas() {
        assert_eq!(parse("1x3x224x224"), Ok(vec![1, 3, 224, 224]));
        assert_eq!(parse("1, 64"), Ok(vec![1, 64]));
        assert_eq!(parse("scalar"), Ok(vec![]));
        for bad in ["", "1x", "axb", "-1x2"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_batch_is_filled_from_the_data() {
        assert_eq!(fill(&input(&[-1, 64]), 192), Ok(vec![3, 64]));
        assert_eq!(fill(&input(&[2, 2]), 4), Ok(vec![2, 2]));
        assert_eq!(fill(&input(&[]), 1), Ok(vec![]));
        for (shape, count) in [(&[-1, 64][..], 65), (&[-1, 64], 0), (&[2, 2], 5), (&[-1, -1], 4)] {
            assert!(fill(&input(shape), count).is_err(), "{shape:?} {count}");
        }
    }

    #[test]
    fn one_item_is_a_batch_of_one() {
        assert_eq!(fit(&input(&[-1, 64]), &[3, 64]), Ok(vec![3, 64]));
        assert_eq!(fit(&input(&[-1, 64]), &[64]), Ok(vec![1, 64]));
        assert_eq!(fit(&input(&[1, 64]), &[64]), Ok(vec![1, 64]));
        assert!(fit(&input(&[-1, 64]), &[65]).is_err());
        assert!(fit(&input(&[2, 64]), &[64]).is_err());
    }
}
