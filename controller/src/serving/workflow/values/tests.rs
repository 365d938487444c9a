use super::*;

fn value(rows: i64, bytes: &'static [u8]) -> RunTensor {
    RunTensor::given(NamedTensor {
        name: "x".into(),
        datatype: DataType::Uint8,
        shape: vec![rows, 2],
        data: Bytes::from_static(bytes),
    })
}

#[test]
fn rows_of_several_parts_join_in_their_order() {
    let mut joined = value(1, b"ab").at(1);
    joined.put(0, value(2, b"cdef"));
    let whole = joined.clone().whole("y").unwrap();
    assert_eq!((whole.shape, &whole.data[..]), (vec![3, 2], &b"cdefab"[..]));
    let rows = [0, 1, 2].map(|row| joined.sent("y", Some(row)).unwrap().tensor);
    assert_eq!(rows.clone().map(|row| row.data), [&b"cd"[..], b"ef", b"ab"]);
    assert!(rows.iter().all(|row| row.shape == [1, 2]));
    assert!(joined.sent("y", Some(3)).is_err());
}

#[test]
fn an_input_has_its_function_and_its_size() {
    let f = FunctionName::new("f").unwrap();
    let mut joined = value(1, b"ab").by(&f).at(1);
    joined.put(0, value(2, b"cdef"));
    let said = |row: Option<u64>| {
        let StepCallInput { by, bytes, .. } = joined.sent("y", row).unwrap();
        (by, bytes)
    };
    assert_eq!([said(None), said(Some(1))], [(Some(f.clone()), 6), (Some(f), 2)]);
    assert_eq!(value(1, b"ab").sent("y", None).unwrap().by, None, "the tensor arrived with the request");
}

#[test]
fn rows_of_different_shapes_do_not_join() {
    let mut joined = value(1, b"ab");
    let wide = NamedTensor {
        name: "x".into(),
        datatype: DataType::Uint8,
        shape: vec![1, 3],
        data: Bytes::from_static(b"abc"),
    };
    joined.put(1, RunTensor::given(wide));
    assert_eq!(joined.whole("y").unwrap_err().reason, Reason::InvalidOutput);
}

#[test]
fn rows_that_overflow_a_shape_do_not_join() {
    for (first, second) in [(i64::MAX, 1), (i64::MIN, -1)] {
        let mut joined = value(first, b"ab");
        joined.put(1, value(second, b"cd"));
        assert_eq!(joined.sent("y", None).unwrap_err().reason, Reason::InvalidOutput);
        assert_eq!(joined.whole("y").unwrap_err().reason, Reason::InvalidOutput);
    }
    let mut joined = value(i64::MAX, b"ab");
    joined.put(1, value(i64::MAX, b"cd"));
    joined.put(2, value(i64::MAX, b"ef"));
    assert_eq!(joined.sent("y", Some(u64::MAX)).unwrap_err().reason, Reason::Internal);
}

#[test]
fn outputs_of_a_nested_workflow_belong_to_its_call() {
    let mut inner = value(1, b"ab");
    inner.put(1, value(2, b"cdef"));
    let mut outer = inner.clone().at(4);
    outer.put(2, value(1, b"gh"));
    let whole = outer.clone().whole("y").unwrap();
    assert_eq!((whole.shape, &whole.data[..]), (vec![4, 2], &b"ghabcdef"[..]));
    outer.lose(4);
    assert_eq!(outer.whole("y").unwrap().shape, [1, 2]);
}

#[test]
fn empty_rows_join_regardless_of_their_shape() {
    let none = RunTensor::given(NamedTensor {
        name: "x".into(),
        datatype: DataType::Uint8,
        shape: vec![0, 0],
        data: Bytes::new(),
    });
    let mut joined = none.clone();
    joined.put(1, value(1, b"ab"));
    assert_eq!(joined.sent("y", Some(0)).unwrap().tensor.data, &b"ab"[..]);
    let mut nothing = none.clone();
    nothing.put(1, none);
    assert_eq!(nothing.whole("y").unwrap().shape, [0, 0]);
}

#[test]
fn answered_bytes_count_against_the_budget_until_their_last_part_is_dropped() {
    let room = RunByteBudget::new(millrace_types::Bytes(4096));
    let first = room.keep(vec![0; 3000].into()).unwrap();
    let part = Part { shape: vec![3], contents: first };
    let row = part.rows(1, 3);
    assert_eq!(room.keep(vec![0; 1500].into()).unwrap_err().reason, Reason::ByteBudgetExceeded);
    drop(part);
    assert!(room.keep(vec![0; 1500].into()).is_err(), "a row keeps the whole part");
    drop(row);
    assert!(room.keep(vec![0; 4096].into()).is_ok());
}

#[test]
fn a_condition_holds_if_any_element_is_not_zero() {
    for (datatype, bytes, holds) in [
        ("BOOL", &[0, 1][..], Some(true)),
        ("INT64", &[0; 16], Some(false)),
        ("INT8", &[0x80], Some(true)),
        ("FP32", &[0, 0, 0, 0x80], Some(false)),
        ("FP32", &[0, 0, 1, 0], Some(true)),
        ("FP16", &[0, 0x80, 0, 0], Some(false)),
        ("BYTES", &[0; 4], None),
        ("FP32", &[], Some(false)),
    ] {
        assert_eq!(is_nonzero(datatype, bytes), holds, "{datatype} {bytes:?}");
    }
}

#[test]
fn an_empty_tensor_has_the_facts_of_an_empty_tensor() {
    let none = RunTensor::given(NamedTensor {
        name: "x".into(),
        datatype: DataType::Fp32,
        shape: vec![0, 3],
        data: Bytes::new(),
    });
    let facts = none.facts(true);
    assert!(facts.is_empty && facts.rows == 0 && facts.holds == Some(false));
    assert_eq!(value(2, b"abcd").facts(false), TensorFacts { rows: 2, is_empty: false, holds: None });
}
