//! Bounds the memory that decoding a protobuf message takes, before any part of the message is
//! decoded.
//!
//! prost builds structures many times as large as their encoding: a tensor without fields is 2
//! bytes on the wire and hundreds in memory, and an `int64` of a packed list is 1 byte on the wire
//! and 8 in memory. [`MessageWalk`] reads tags and lengths from pieces as they arrive, copies no
//! payload, and adds up the memory that prost would allocate, by the shapes in
//! [`DESCRIPTORS`](crate::DESCRIPTORS):
//!
//! ```text
//! pieces of one message ─ MessageWalk::push ─> Ok, and decoded_bytes() so far
//!                                           └> DecodeRefusal: too many fields, elements, bytes
//! ```
//!
//! Every message may take at most 3 bytes of memory for each byte of its length, plus 32 MiB. The
//! message and its decoded form together then take at most 4 times the length plus 32 MiB. Clients'
//! messages must also keep to [`WalkLimits::CLIENT`]. [`CheckedCodec`] is the codec of all
//! generated services and clients; [`decode`] serves messages outside gRPC.

use std::collections::HashMap;
use std::marker::PhantomData;
use std::sync::LazyLock;

use bytes::{Buf as _, Bytes};
use millrace_types::{Failure, Reason};
use prost::{Message, Name};
use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{DescriptorProto, FieldDescriptorProto, FileDescriptorSet};
use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::task::block_in_place;
use tonic::Status;
use tonic::codec::{BufferSettings, Codec, DecodeBuf, Decoder};
use tonic_prost::ProstEncoder;

use crate::status::to_status;

/// Maximum memory of a decoded message for each byte of its length, in bytes, beside the message
/// itself.
pub const DECODED_RATIO_MAX: u64 = 3;
/// Memory that any decoded message may take beyond [`DECODED_RATIO_MAX`], in bytes.
pub const DECODED_MARGIN_BYTES: u64 = 32 << 20;
/// Maximum nesting depth. The schemas nest less deeply, because no message type contains itself.
pub const NESTING_MAX: usize = 32;
/// Slots that a list of messages or strings allocates for each element. A `Vec` begins with four
/// slots and has up to twice as many slots as elements. While a `Vec` grows, the old slots exist
/// too.
const PLACES: u64 = 4;
/// Slots that a list of numbers allocates for each element. Only long lists matter here, and they
/// exceed the first four slots.
const GROWTH: u64 = 3;
/// Memory of a short list of numbers: its first allocation with the allocator's header, in bytes.
const SHORT_LIST_BYTES: u64 = 48;
/// Slots of a map's first entry: a whole node of a `BTreeMap`, with 11 entries and its links.
const MAP_NODE: u64 = 12;
/// The allocator's header and rounding, in bytes for each allocation.
const ALLOCATION_BYTES: u64 = 16;
/// Memory of a decoded message, in bytes, from which decoding occupies a thread for milliseconds.
/// Bytes shared with the message do not count.
const LONG_DECODED_BYTES: u64 = 1 << 20;
/// Maximum length of a varint, in bytes.
const VARINT_BYTES_MAX: u32 = 10;
/// The reason to refuse a group. prost skips groups; none of the schemas has a group.
const GROUP: &str = "a group or a wire type that protobuf does not have";
/// The reason to refuse a message field or a map's entry with another wire type.
const UNLENGTHED: &str = "a message or a map's entry without a length";
/// The message type whose lists are elements of tensors: their bytes count as contents, not as
/// text.
const TENSOR_CONTENTS: &str = "inference.InferTensorContents";

/// Limits on the counts of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WalkLimits {
    /// Maximum number of fields at all depths. All elements of a packed list count as a single
    /// field.
    pub fields_max: u64,
    /// Maximum number of messages directly inside the message: tensors, parameters, requested
    /// outputs.
    pub elements_max: u64,
    /// Maximum number of bytes outside byte fields and tensor contents.
    pub text_bytes_max: u64,
}

impl WalkLimits {
    /// Limits for messages of clients. No inference request or admin call comes near them.
    pub const CLIENT: Self = Self { fields_max: 65_536, elements_max: 4_096, text_bytes_max: 1 << 20 };
    /// Limits for messages of controllers, workers, executors and programs. Long lists are sent in
    /// parts of about 1 MiB, which have far fewer fields. Reading as many fields as these limits
    /// allow takes a thread some milliseconds.
    pub const PEER: Self = Self { fields_max: 1 << 18, elements_max: 1 << 18, text_bytes_max: u64::MAX };
}

/// The reason why a message is not decoded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DecodeRefusal {
    /// The bytes are not a protobuf message.
    #[error("the message is not valid protobuf: {0}")]
    Malformed(&'static str),
    /// The message has more than [`WalkLimits::fields_max`] fields.
    #[error("the message has more than {max} fields: send its tensors in fewer, larger pieces")]
    TooManyFields { max: u64 },
    /// The message has more than [`WalkLimits::elements_max`] messages directly inside.
    #[error("the message has more than {max} tensors and parameters: split it into several")]
    TooManyElements { max: u64 },
    /// The message has more than [`WalkLimits::text_bytes_max`] bytes of text.
    #[error("the message has more than {max} bytes outside its contents: shorten names and parameters")]
    TooMuchText { max: u64 },
    /// The decoded form exceeds [`DECODED_RATIO_MAX`] and [`DECODED_MARGIN_BYTES`].
    #[error(
        "the message of {len} bytes would take {decoded} bytes of memory: send contents as raw bytes, in \
         fewer fields"
    )]
    TooLarge {
        /// The length of the message, or of the part that has arrived, in bytes.
        len: u64,
        /// The estimated size in memory, in bytes.
        decoded: u64,
    },
}

impl DecodeRefusal {
    /// Returns the failure for the message's sender. Not a `From`, because a second source of
    /// failures would leave the type of many errors ambiguous.
    #[must_use]
    pub fn failure(&self) -> Failure {
        let message = self.to_string();
        match self {
            // Not retryable: memory that other requests free does not help.
            Self::TooLarge { .. } => {
                Failure { retryable: false, ..Failure::new(Reason::ByteBudgetExceeded, message) }
            }
            _ => Failure::malformed(message),
        }
    }
}

/// The reason why bytes were not decoded into a message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The walk refused the bytes.
    #[error(transparent)]
    Refused(#[from] DecodeRefusal),
    /// prost refused the bytes.
    #[error("the message is not valid protobuf: {0}")]
    Prost(#[from] prost::DecodeError),
}

/// A message type of [`DESCRIPTORS`](crate::DESCRIPTORS).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MessageType(usize);

impl MessageType {
    /// Returns the request type of a gRPC method by the method's path. `None` for methods of other
    /// schemas.
    #[must_use]
    pub fn of_requests(path: &str) -> Option<Self> {
        SCHEMA.requests.get(path).copied()
    }

    /// Returns a type by its full name, such as `inference.ModelInferRequest`.
    #[must_use]
    pub fn named(full_name: &str) -> Option<Self> {
        SCHEMA.types.get(full_name).copied()
    }

    fn shape(self) -> &'static MessageShape {
        &SCHEMA.shapes[self.0]
    }
}

static SCHEMA: LazyLock<Schema> = LazyLock::new(|| {
    let descriptors =
        FileDescriptorSet::decode(crate::DESCRIPTORS).expect("the descriptors are from this crate's build");
    Schema::new(&descriptors)
});

struct Schema {
    types: HashMap<String, MessageType>,
    requests: HashMap<String, MessageType>,
    shapes: Vec<MessageShape>,
}

/// The facts about a message type that the walk needs.
struct MessageShape {
    /// Size of the struct in memory, in bytes, without the allocations of its fields.
    bytes: u64,
    /// Fields by number, sorted.
    fields: Vec<(u32, FieldShape)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FieldShape {
    /// A number, which is part of the message's struct.
    Number,
    /// A list of numbers of `bytes` each, packed or not.
    Numbers { bytes: u64, wire: NumberWire, is_contents: bool },
    /// A string. `each` is the memory of its slots in a list, 0 outside of lists.
    Text { each: u64 },
    /// A byte field, which stays in the buffer in which it arrived. `each` is the memory of its
    /// slots in a list.
    Bytes { each: u64 },
    /// A message. `each` is the memory of its slots in a list or map, 0 outside of them.
    Message { kind: MessageType, each: u64 },
    /// A field that prost skips.
    Unknown,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NumberWire {
    Varint,
    Fixed { bytes: u64 },
}

impl Schema {
    fn new(descriptors: &FileDescriptorSet) -> Self {
        let mut messages = Vec::new();
        for file in &descriptors.file {
            for message in &file.message_type {
                collect(file.package(), message, &mut messages);
            }
        }
        let types: HashMap<_, _> =
            messages.iter().enumerate().map(|(at, (name, _))| (name.clone(), MessageType(at))).collect();
        let mut sizes = vec![None; messages.len()];
        for at in 0..messages.len() {
            size(at, &messages, &types, &mut sizes);
        }
        let size_of = |kind: MessageType| sizes[kind.0].unwrap_or_default();
        let shapes = messages.iter().enumerate().map(|(at, (name, message))| {
            let mut fields: Vec<_> = message
                .field
                .iter()
                .map(|field| {
                    let kind = types.get(field.type_name().trim_start_matches('.')).copied();
                    let is_map = kind.is_some_and(|kind| is_map_entry(messages[kind.0].1));
                    let place = kind.map_or(0, size_of);
                    (field.number().cast_unsigned(), read_field(field, kind, is_map, place, name))
                })
                .collect();
            fields.sort_by_key(|(number, _)| *number);
            MessageShape { bytes: size_of(MessageType(at)), fields }
        });
        let shapes = shapes.collect();
        let services = descriptors.file.iter().flat_map(|file| {
            file.service
                .iter()
                .map(move |service| (format!("{}.{}", file.package(), service.name()), service))
        });
        let requests = services
            .flat_map(|(service, descriptor)| {
                descriptor.method.iter().map(move |method| {
                    (format!("/{service}/{}", method.name()), method.input_type().trim_start_matches('.'))
                })
            })
            .filter_map(|(path, input)| Some((path, *types.get(input)?)))
            .collect();
        Self { types, requests, shapes }
    }
}

/// Collects `message` and all message types nested in it, with their full names.
fn collect<'a>(scope: &str, message: &'a DescriptorProto, found: &mut Vec<(String, &'a DescriptorProto)>) {
    let name = format!("{scope}.{}", message.name());
    for nested in &message.nested_type {
        collect(&name, nested, found);
    }
    found.push((name, message));
}

fn is_map_entry(message: &DescriptorProto) -> bool {
    message.options.as_ref().is_some_and(prost_types::MessageOptions::map_entry)
}

fn is_list(field: &FieldDescriptorProto) -> bool {
    field.label() == Label::Repeated
}

/// Returns the size of prost's struct for a message, in bytes, rounded up: each field takes whole
/// words.
fn size(
    at: usize,
    messages: &[(String, &DescriptorProto)],
    types: &HashMap<String, MessageType>,
    sizes: &mut [Option<u64>],
) -> u64 {
    if let Some(known) = sizes[at] {
        return known;
    }
    // A message type that contains itself would be boxed; a test refuses such schemas.
    sizes[at] = Some(8);
    let mut total = 0;
    // Of the fields of a oneof only one exists at a time, so the largest counts.
    let mut oneofs = HashMap::<i32, u64>::new();
    for field in &messages[at].1.field {
        let bytes = match field.r#type() {
            _ if is_list(field) => 24,
            Type::String => 32,
            Type::Bytes => 40,
            Type::Message | Type::Group => {
                let kind = types.get(field.type_name().trim_start_matches('.'));
                8 + kind.map_or(0, |kind| size(kind.0, messages, types, sizes))
            }
            // An optional number takes an additional word.
            _ => 16,
        };
        match field.oneof_index.filter(|_| !field.proto3_optional()) {
            Some(oneof) => {
                let largest = oneofs.entry(oneof).or_default();
                *largest = bytes.max(*largest);
            }
            None => total += bytes,
        }
    }
    total += oneofs.values().sum::<u64>();
    sizes[at] = Some(total);
    total
}

fn read_field(
    field: &FieldDescriptorProto,
    kind: Option<MessageType>,
    is_map: bool,
    place: u64,
    parent: &str,
) -> FieldShape {
    let in_list = |bytes: u64| if is_list(field) { bytes * PLACES } else { 0 };
    let numbers = |bytes: u64, wire: NumberWire| match is_list(field) {
        true => FieldShape::Numbers { bytes, wire, is_contents: parent == TENSOR_CONTENTS },
        false => FieldShape::Number,
    };
    match (field.r#type(), kind) {
        (Type::String, _) => FieldShape::Text { each: in_list(24) },
        (Type::Bytes, _) => FieldShape::Bytes { each: in_list(32) },
        (Type::Message | Type::Group, Some(kind)) if is_map => {
            FieldShape::Message { kind, each: place * MAP_NODE }
        }
        (Type::Message | Type::Group, Some(kind)) => FieldShape::Message { kind, each: in_list(place) },
        (Type::Message | Type::Group, None) => FieldShape::Unknown,
        (Type::Double, _) | (Type::Fixed64 | Type::Sfixed64, _) => numbers(8, NumberWire::Fixed { bytes: 8 }),
        (Type::Float | Type::Fixed32 | Type::Sfixed32, _) => numbers(4, NumberWire::Fixed { bytes: 4 }),
        (Type::Bool, _) => numbers(1, NumberWire::Varint),
        (Type::Int32 | Type::Uint32 | Type::Sint32 | Type::Enum, _) => numbers(4, NumberWire::Varint),
        (Type::Int64 | Type::Uint64 | Type::Sint64, _) => numbers(8, NumberWire::Varint),
    }
}

/// A pass over the bytes of a message, in pieces of any size.
#[derive(Debug)]
pub struct MessageWalk {
    limits: WalkLimits,
    /// The message and the open messages inside it, outermost first.
    open: Vec<OpenMessage>,
    position: WalkPosition,
    /// Bytes read so far.
    read: u64,
    fields: u64,
    elements: u64,
    text_bytes: u64,
    /// Memory for structs, strings and the slots of lists, including slots to grow into, in bytes.
    structure_bytes: u64,
    /// Memory for the numbers of lists, without slots to grow into, in bytes.
    number_bytes: u64,
}

#[derive(Debug, Clone, Copy)]
struct OpenMessage {
    kind: MessageType,
    /// The position of its end, counted from the beginning of the outermost message; `u64::MAX` if
    /// unknown.
    end: u64,
}

/// The kind of the next byte.
#[derive(Debug, Clone, Copy)]
enum WalkPosition {
    Tag(Varint),
    Value(Varint),
    /// The length of a length-delimited field.
    Length(FieldShape, Varint),
    /// A payload that is skipped.
    Payload {
        left: u64,
    },
    /// Packed varints, which are counted by their last bytes.
    Packed {
        left: u64,
        bytes: u64,
    },
}

/// A varint that is partly read.
#[derive(Debug, Clone, Copy, Default)]
struct Varint {
    value: u64,
    bytes: u32,
}

impl Varint {
    /// Adds a byte. Returns the value if the byte was the last.
    fn push(&mut self, byte: u8) -> Result<Option<u64>, DecodeRefusal> {
        // The tenth byte holds only the last of the 64 bits.
        if self.bytes == VARINT_BYTES_MAX - 1 && byte > 1 {
            return Err(DecodeRefusal::Malformed("a number of more than 64 bits"));
        }
        self.value |= u64::from(byte & 0x7f) << (7 * self.bytes);
        self.bytes += 1;
        Ok((byte & 0x80 == 0).then_some(self.value))
    }
}

impl MessageWalk {
    /// Creates a walk over a message of this type. `len` is the message's length, if known
    /// beforehand.
    #[must_use]
    pub fn new(kind: MessageType, len: Option<u64>, limits: WalkLimits) -> Self {
        Self {
            limits,
            open: vec![OpenMessage { kind, end: len.unwrap_or(u64::MAX) }],
            position: WalkPosition::Tag(Varint::default()),
            read: 0,
            fields: 0,
            elements: 0,
            text_bytes: 0,
            structure_bytes: kind.shape().bytes,
            number_bytes: 0,
        }
    }

    /// Returns the memory of the decoded form of the bytes read so far.
    #[must_use]
    pub fn decoded_bytes(&self) -> u64 {
        self.structure_bytes + self.number_bytes
    }

    /// Reads the next piece.
    ///
    /// # Errors
    /// [`DecodeRefusal`] if the message must not be decoded.
    pub fn push(&mut self, mut piece: &[u8]) -> Result<(), DecodeRefusal> {
        while !piece.is_empty() {
            let taken = match self.position {
                WalkPosition::Payload { left } => self.pass(left, piece),
                WalkPosition::Packed { left, bytes } => self.count(left, bytes, piece),
                _ => {
                    self.step(piece[0])?;
                    1
                }
            };
            piece = &piece[taken..];
            self.close();
        }
        self.check()
    }

    /// Ends the walk and checks that every message is complete.
    ///
    /// # Errors
    /// [`DecodeRefusal::Malformed`] if a message is cut short.
    pub fn finish(self) -> Result<(), DecodeRefusal> {
        let between_fields = matches!(self.position, WalkPosition::Tag(Varint { bytes: 0, .. }));
        match self.open.as_slice() {
            [] => Ok(()),
            [outermost] if between_fields && [self.read, u64::MAX].contains(&outermost.end) => Ok(()),
            _ => Err(DecodeRefusal::Malformed("its last field is cut short")),
        }
    }

    /// Skips payload. Returns the number of bytes used from the piece.
    fn pass(&mut self, left: u64, piece: &[u8]) -> usize {
        let taken = (piece.len() as u64).min(left);
        self.read += taken;
        self.position = WalkPosition::Payload { left: left - taken };
        taken as usize
    }

    /// Counts packed varints. Returns the number of bytes used from the piece.
    fn count(&mut self, left: u64, bytes: u64, piece: &[u8]) -> usize {
        let taken = (piece.len() as u64).min(left);
        let ends = piece[..taken as usize].iter().filter(|&&byte| byte < 0x80).count();
        self.number_bytes += ends as u64 * bytes;
        self.read += taken;
        self.position = WalkPosition::Packed { left: left - taken, bytes };
        taken as usize
    }

    /// Reads a byte of a tag, a number or a length.
    fn step(&mut self, byte: u8) -> Result<(), DecodeRefusal> {
        let Some(innermost) = self.open.last().copied() else {
            return Err(DecodeRefusal::Malformed("bytes follow its end"));
        };
        if self.read >= innermost.end {
            return Err(DecodeRefusal::Malformed("a field is longer than the message that holds it"));
        }
        self.read += 1;
        self.text_bytes += 1;
        match &mut self.position {
            WalkPosition::Tag(tag) => {
                if let Some(tag) = tag.push(byte)? {
                    self.begin_field(tag, innermost)?;
                }
            }
            WalkPosition::Value(value) => {
                if value.push(byte)?.is_some() {
                    self.position = WalkPosition::Tag(Varint::default());
                }
            }
            WalkPosition::Length(field, length) => {
                let field = *field;
                if let Some(length) = length.push(byte)? {
                    self.begin_payload(field, length, innermost)?;
                }
            }
            WalkPosition::Payload { .. } | WalkPosition::Packed { .. } => {}
        }
        Ok(())
    }

    fn begin_field(&mut self, tag: u64, innermost: OpenMessage) -> Result<(), DecodeRefusal> {
        let number = u32::try_from(tag >> 3).ok().filter(|&number| number > 0 && tag <= u64::from(u32::MAX));
        let number = number.ok_or(DecodeRefusal::Malformed("a field number that protobuf does not have"))?;
        self.fields += 1;
        let fields = &innermost.kind.shape().fields;
        let known = fields.binary_search_by_key(&number, |(number, _)| *number);
        let field = known.map_or(FieldShape::Unknown, |at| fields[at].1);
        let wire_type = tag & 7;
        if let (FieldShape::Numbers { bytes, .. }, 0 | 1 | 5) = (field, wire_type) {
            self.number_bytes += bytes;
            self.structure_bytes += SHORT_LIST_BYTES;
        }
        // prost ignores the wire type of a map's entry, and reads a message. The walk and prost would then
        // disagree about the start of the next field.
        if matches!(field, FieldShape::Message { .. }) && wire_type != 2 {
            return Err(DecodeRefusal::Malformed(UNLENGTHED));
        }
        let fixed = |bytes: u64| match innermost.end - self.read < bytes {
            true => Err(DecodeRefusal::Malformed("a field is longer than the message that holds it")),
            false => Ok(WalkPosition::Payload { left: bytes }),
        };
        self.position = match wire_type {
            0 => WalkPosition::Value(Varint::default()),
            1 => fixed(8)?,
            2 => WalkPosition::Length(field, Varint::default()),
            5 => fixed(4)?,
            _ => return Err(DecodeRefusal::Malformed(GROUP)),
        };
        if self.fields > self.limits.fields_max {
            return Err(DecodeRefusal::TooManyFields { max: self.limits.fields_max });
        }
        Ok(())
    }

    fn begin_payload(
        &mut self,
        field: FieldShape,
        length: u64,
        innermost: OpenMessage,
    ) -> Result<(), DecodeRefusal> {
        if length > innermost.end - self.read {
            return Err(DecodeRefusal::Malformed("a field is longer than the message that holds it"));
        }
        self.position = WalkPosition::Payload { left: length };
        match field {
            FieldShape::Message { kind, each } => {
                self.structure_bytes += each;
                self.elements += u64::from(self.open.len() == 1);
                if self.elements > self.limits.elements_max {
                    return Err(DecodeRefusal::TooManyElements { max: self.limits.elements_max });
                }
                if self.open.len() == NESTING_MAX {
                    return Err(DecodeRefusal::Malformed("its messages are nested too deeply"));
                }
                // Only the end of the outermost message may be unknown, and a length is at most the
                // rest of its message.
                self.open.push(OpenMessage { kind, end: self.read.saturating_add(length) });
                self.position = WalkPosition::Tag(Varint::default());
            }
            FieldShape::Numbers { bytes, wire, is_contents } => {
                self.text_bytes += if is_contents { 0 } else { length };
                self.structure_bytes += SHORT_LIST_BYTES;
                match wire {
                    NumberWire::Varint => self.position = WalkPosition::Packed { left: length, bytes },
                    NumberWire::Fixed { bytes: width } => self.number_bytes += length / width * bytes,
                }
            }
            FieldShape::Text { each } => {
                self.text_bytes += length;
                self.structure_bytes += each + length + ALLOCATION_BYTES;
            }
            FieldShape::Bytes { each } => self.structure_bytes += each,
            // prost refuses a number with a length, and skips unknown fields.
            FieldShape::Number | FieldShape::Unknown => self.text_bytes += length,
        }
        self.check()
    }

    /// Closes the payload and the messages that end at this position.
    fn close(&mut self) {
        if let WalkPosition::Payload { left: 0 } | WalkPosition::Packed { left: 0, .. } = self.position {
            self.position = WalkPosition::Tag(Varint::default());
        }
        if matches!(self.position, WalkPosition::Tag(Varint { bytes: 0, .. })) {
            while self.open.last().is_some_and(|innermost| innermost.end == self.read) {
                self.open.pop();
            }
        }
    }

    fn check(&self) -> Result<(), DecodeRefusal> {
        if self.text_bytes > self.limits.text_bytes_max {
            return Err(DecodeRefusal::TooMuchText { max: self.limits.text_bytes_max });
        }
        let known = self.open.first().map_or(self.read, |outermost| outermost.end);
        let len = if known == u64::MAX { self.read } else { known };
        let decoded = self.structure_bytes + GROWTH * self.number_bytes;
        if decoded > len.saturating_mul(DECODED_RATIO_MAX).saturating_add(DECODED_MARGIN_BYTES) {
            return Err(DecodeRefusal::TooLarge { len, decoded });
        }
        Ok(())
    }
}

/// Checks a message with a walk and decodes the message. Byte fields share the buffer.
///
/// # Errors
/// [`DecodeError`].
pub fn decode<M: Message + Name + Default>(message: Bytes, limits: WalkLimits) -> Result<M, DecodeError> {
    let bytes = check::<M>(&message, limits)?;
    let decode = || M::decode(message);
    Ok(if bytes < LONG_DECODED_BYTES { decode()? } else { run_blocking(decode)? })
}

/// Checks a whole message with a walk. Returns the memory of the decoded form, in bytes.
fn check<M: Name>(message: &[u8], limits: WalkLimits) -> Result<u64, DecodeRefusal> {
    // Every generated type is in the descriptors, because both come from the same build.
    let kind = MessageType::named(&M::full_name()).ok_or(DecodeRefusal::Malformed("its type is unknown"))?;
    let mut walk = MessageWalk::new(kind, Some(message.len() as u64), limits);
    walk.push(message)?;
    let decoded = walk.decoded_bytes();
    walk.finish()?;
    Ok(decoded)
}

/// Runs work of some milliseconds in such a way that other threads take over this thread's tasks. A
/// single-threaded runtime has no other threads, so the work then runs in place.
fn run_blocking<T>(work: impl FnOnce() -> T) -> T {
    let flavor = Handle::try_current().map(|runtime| runtime.runtime_flavor());
    if flavor.is_ok_and(|flavor| flavor == RuntimeFlavor::MultiThread) {
        return block_in_place(work);
    }
    work()
}

/// tonic's prost codec with a decoder that checks each message with a walk before decoding.
#[derive(Debug)]
pub struct CheckedCodec<T, U>(PhantomData<(T, U)>);

impl<T, U> Default for CheckedCodec<T, U> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<T, U> Codec for CheckedCodec<T, U>
where
    T: Message + Send + 'static,
    U: Message + Name + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = ProstEncoder<T>;
    type Decoder = CheckedDecoder<U>;

    fn encoder(&mut self) -> Self::Encoder {
        ProstEncoder::default()
    }

    fn decoder(&mut self) -> Self::Decoder {
        CheckedDecoder(PhantomData)
    }
}

#[derive(Debug)]
pub struct CheckedDecoder<U>(PhantomData<U>);

impl<U: Message + Name + Default> Decoder for CheckedDecoder<U> {
    type Item = U;
    type Error = Status;

    fn decode(&mut self, message: &mut DecodeBuf<'_>) -> Result<Option<U>, Status> {
        // tonic holds a whole message in a single piece. If the piece were cut, the walk would
        // refuse the message.
        let bytes =
            check::<U>(message.chunk(), WalkLimits::PEER).map_err(|refusal| to_status(&refusal.failure()))?;
        let decode = || U::decode(message);
        let decoded = if bytes < LONG_DECODED_BYTES { decode() } else { run_blocking(decode) };
        Ok(Some(decoded.map_err(|error| Status::internal(error.to_string()))?))
    }

    fn buffer_settings(&self) -> BufferSettings {
        BufferSettings::default()
    }
}

#[cfg(test)]
mod tests;
