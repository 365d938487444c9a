//! Parsing of a client's JSON within bounds: lists have a maximum length, texts have a maximum
//! length, and only known parameters are kept. The parser never builds a tree of a client's values.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use millrace_types::Failure;
use serde::de::{Deserialize, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

use crate::parameters::{KNOWN, ParameterValue};

/// Most bytes of a text, keys included. No JSON field of the protocol needs a longer text, and a
/// parser's error may quote it.
const TEXT_BYTES_MAX: usize = 64 << 10;
/// Most bytes of a `parameters` object.
const PARAMETERS_BYTES_MAX: usize = 64 << 10;
/// Most entries of a `parameters` object.
const PARAMETERS_MAX: usize = 256;

/// Parses a JSON document.
pub(crate) fn read<'a, T: Deserialize<'a>>(json: &'a [u8]) -> Result<T, Failure> {
    refuse_long_texts(json)?;
    serde_json::from_slice(json).map_err(|error| malformed(&error))
}

fn malformed(error: &serde_json::Error) -> Failure {
    Failure::malformed(format!("the request does not follow the protocol: {error}"))
}

/// Refuses a text longer than [`TEXT_BYTES_MAX`]. The scan is cheap: numbers, which are most of a
/// body, have no quotes.
fn refuse_long_texts(json: &[u8]) -> Result<(), Failure> {
    let mut rest = json;
    while let Some(begin) = rest.iter().position(|&byte| byte == b'"') {
        rest = &rest[begin + 1..];
        let mut is_escaped = false;
        let end = rest.iter().position(|&byte| {
            let ends = byte == b'"' && !is_escaped;
            is_escaped = byte == b'\\' && !is_escaped;
            ends
        });
        let len = end.unwrap_or(rest.len());
        if len > TEXT_BYTES_MAX {
            return Err(Failure::malformed(format!(
                "the request has a text of {len} bytes: a text may have {TEXT_BYTES_MAX}, and contents are \
                 numbers or binary data"
            )));
        }
        rest = rest.get(len + 1..).unwrap_or_default();
    }
    Ok(())
}

/// A list of at most `MAX` elements.
#[derive(Debug)]
pub(crate) struct Bounded<T, const MAX: usize>(pub(crate) Vec<T>);

impl<T, const MAX: usize> Default for Bounded<T, MAX> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<'de, T: Deserialize<'de>, const MAX: usize> Deserialize<'de> for Bounded<T, MAX> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Elements<T, const MAX: usize>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>, const MAX: usize> Visitor<'de> for Elements<T, MAX> {
            type Value = Vec<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a list of at most {MAX}")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<T>, A::Error> {
                let mut elements = Vec::new();
                while let Some(element) = list.next_element()? {
                    if elements.len() == MAX {
                        return Err(A::Error::custom(format_args!("a list has more than {MAX} elements")));
                    }
                    elements.push(element);
                }
                Ok(elements)
            }
        }
        from.deserialize_seq(Elements::<T, MAX>(PhantomData)).map(Self)
    }
}

/// The supported parameters of a request, an input or an output.
#[derive(Debug, Default)]
pub(crate) struct JsonParameters<'a>(BTreeMap<&'static str, JsonValue<'a>>);

impl<'a> JsonParameters<'a> {
    /// Parses a `parameters` object.
    pub(crate) fn read(json: Option<&'a RawValue>) -> Result<Self, Failure> {
        let Some(json) = json else { return Ok(Self::default()) };
        let len = json.get().len();
        if len > PARAMETERS_BYTES_MAX {
            let message = format!("parameters of {len} bytes: at most {PARAMETERS_BYTES_MAX} are read");
            return Err(Failure::malformed(message));
        }
        serde_json::from_str(json.get()).map_err(|error| malformed(&error))
    }

    pub(crate) fn get(&self, name: &str) -> Option<ParameterValue<'_>> {
        self.0.get(name).map(JsonValue::value)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, ParameterValue<'_>)> {
        self.0.iter().map(|(name, value)| (*name, value.value()))
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for JsonParameters<'a> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = JsonParameters<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of parameters")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Self::Value, A::Error> {
                let mut read = BTreeMap::new();
                let mut count = 0;
                while let Some(Text(name)) = entries.next_key()? {
                    count += 1;
                    if count > PARAMETERS_MAX {
                        return Err(A::Error::custom(format_args!("more than {PARAMETERS_MAX} parameters")));
                    }
                    match KNOWN.iter().find(|known| **known == name) {
                        Some(known) => {
                            read.insert(*known, entries.next_value()?);
                        }
                        None => {
                            entries.next_value::<IgnoredAny>()?;
                        }
                    }
                }
                Ok(JsonParameters(read))
            }
        }
        from.deserialize_map(Entries)
    }
}

/// The name of a request's first parameter, if any.
#[derive(Debug, Default)]
pub(crate) struct FirstParameter(pub(crate) Option<String>);

impl<'de> Deserialize<'de> for FirstParameter {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = FirstParameter;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of parameters")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<FirstParameter, A::Error> {
                let first = entries.next_entry::<String, IgnoredAny>()?.map(|(name, _)| name);
                while entries.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(FirstParameter(first))
            }

            fn visit_unit<E: serde::de::Error>(self) -> Result<FirstParameter, E> {
                Ok(FirstParameter(None))
            }
        }
        from.deserialize_any(Entries)
    }
}

/// A text, borrowed from the document if it has no escapes.
struct Text<'a>(Cow<'a, str>);

impl<'de: 'a, 'a> Deserialize<'de> for Text<'a> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Characters;
        impl<'de> Visitor<'de> for Characters {
            type Value = Text<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text")
            }

            fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Text<'de>, E> {
                Ok(Text(Cow::Borrowed(text)))
            }

            fn visit_str<E>(self, text: &str) -> Result<Text<'de>, E> {
                Ok(Text(Cow::Owned(text.to_owned())))
            }
        }
        from.deserialize_str(Characters)
    }
}

/// A parameter's value; lists and objects are skipped.
#[derive(Debug)]
enum JsonValue<'a> {
    Bool(bool),
    Count(u64),
    Text(Cow<'a, str>),
    Other,
}

impl JsonValue<'_> {
    fn value(&self) -> ParameterValue<'_> {
        match self {
            Self::Bool(flag) => ParameterValue::Bool(*flag),
            Self::Count(count) => ParameterValue::Count(*count),
            Self::Text(text) => ParameterValue::Text(text),
            Self::Other => ParameterValue::Other,
        }
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for JsonValue<'a> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = JsonValue<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a value")
            }

            fn visit_bool<E>(self, flag: bool) -> Result<Self::Value, E> {
                Ok(JsonValue::Bool(flag))
            }

            fn visit_u64<E>(self, count: u64) -> Result<Self::Value, E> {
                Ok(JsonValue::Count(count))
            }

            fn visit_i64<E>(self, _number: i64) -> Result<Self::Value, E> {
                Ok(JsonValue::Other)
            }

            fn visit_f64<E>(self, _number: f64) -> Result<Self::Value, E> {
                Ok(JsonValue::Other)
            }

            fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Self::Value, E> {
                Ok(JsonValue::Text(Cow::Borrowed(text)))
            }

            fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
                Ok(JsonValue::Text(Cow::Owned(text.to_owned())))
            }

            fn visit_unit<E>(self) -> Result<Self::Value, E> {
                Ok(JsonValue::Other)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
                while list.next_element::<IgnoredAny>()?.is_some() {}
                Ok(JsonValue::Other)
            }

            fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Self::Value, A::Error> {
                while entries.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(JsonValue::Other)
            }
        }
        from.deserialize_any(Any)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parameters(json: &str) -> Result<Vec<(String, String)>, String> {
        let raw: &RawValue = serde_json::from_str(json).unwrap();
        let read = JsonParameters::read(Some(raw)).map_err(|failure| failure.message)?;
        Ok(read.iter().map(|(name, value)| (name.to_owned(), format!("{value:?}"))).collect())
    }

    #[test]
    fn known_parameters_are_kept_with_their_last_value() {
        let json = r#"{"timeout":1,"mine":{"a":[1,{"b":null}]},"timeout":2,"priority":-1,"binary_data":true,
                       "sequence_id":"a\"b","sequence_end":null,"classification":[1],"sequence_start":1.5}"#;
        let kept = parameters(json).unwrap();
        let expected = [
            ("binary_data", "Bool(true)"),
            ("classification", "Other"),
            ("priority", "Other"),
            ("sequence_end", "Other"),
            ("sequence_id", r#"Text("a\"b")"#),
            ("sequence_start", "Other"),
            ("timeout", "Count(2)"),
        ];
        assert_eq!(kept, expected.map(|(name, value)| (name.to_owned(), value.to_owned())));
        assert!(parameters("[]").is_err());
    }

    #[test]
    fn parameters_beyond_their_entries_or_bytes_are_refused() {
        let entries =
            |count: usize| (0..count).map(|at| format!(r#""p{at}":0"#)).collect::<Vec<_>>().join(",");
        assert!(parameters(&format!("{{{}}}", entries(PARAMETERS_MAX))).is_ok());
        assert!(parameters(&format!("{{{}}}", entries(PARAMETERS_MAX + 1))).unwrap_err().contains("256"));
        let zeros = format!(r#"{{"p":[{}0]}}"#, "0,".repeat(PARAMETERS_BYTES_MAX / 2));
        assert!(parameters(&zeros).unwrap_err().contains("65536"));
    }

    #[test]
    fn a_list_longer_than_its_maximum_is_refused() {
        assert_eq!(read::<Bounded<u8, 2>>(b"[1,2]").unwrap().0, [1, 2]);
        assert!(read::<Bounded<u8, 2>>(b"[1,2,3]").unwrap_err().message.contains("more than 2"));
    }

    #[test]
    fn a_long_text_is_refused_at_any_position() {
        let long = "x".repeat(TEXT_BYTES_MAX + 1);
        for json in [
            format!(r#"["{long}"]"#),
            format!(r#"{{"{long}":1}}"#),
            format!(r#""{long}"#),
            format!(r#"["\\","\"{}"]"#, "x".repeat(TEXT_BYTES_MAX)),
        ] {
            assert!(refuse_long_texts(json.as_bytes()).is_err());
        }
        let most = "x".repeat(TEXT_BYTES_MAX);
        for json in
            [format!(r#"["{most}","{most}"]"#), r#"["\\","\"",1]"#.into(), r#""\"#.into(), String::new()]
        {
            assert!(refuse_long_texts(json.as_bytes()).is_ok());
        }
    }

    #[test]
    fn the_name_of_the_first_parameter_is_read() {
        let first = |json: &str| read::<FirstParameter>(json.as_bytes()).unwrap().0;
        assert_eq!(first(r#"{"a":[1,[2]],"b":{}}"#), Some("a".into()));
        assert_eq!((first("{}"), first("null")), (None, None));
    }
}
