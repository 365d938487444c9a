//! Bounds the memory that decoding a protobuf message takes, before any of the message is decoded.
//!
//! prost builds structures many times as large as their bytes: a tensor without fields is 2 bytes on
//! the wire and hundreds in memory, and an `int64` of a packed list is 1 byte and 8. [`MessageWalk`]
//! reads tags and lengths from pieces as they arrive, copies no payload, and adds up what prost would
//! allocate, by the shapes that [`DESCRIPTORS`](crate::DESCRIPTORS) give:
//!
//! ```text
//! pieces of one message ─ MessageWalk::push ─> Ok, and decoded_bytes() so far
//!                                           └> DecodeRefusal: too many fields, elements, bytes
//! ```
//!
//! Every message: at most 3 bytes in memory for each byte of the message, and 32 MiB, so that the
//! message and its decoded form together stay within 4 times its length and 32 MiB. Clients' messages
//! are held to [`WalkLimits::CLIENT`] too. [`CheckedCodec`] is the codec of every generated service and
//! client, and [`decode`] serves messages that no gRPC call carries.

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

/// Bytes that a message may take in memory for each byte of its length, beside the message itself.
pub const DECODED_RATIO_MAX: u64 = 3;
/// Bytes that any message may take in memory beyond [`DECODED_RATIO_MAX`].
pub const DECODED_MARGIN_BYTES: u64 = 32 << 20;
/// Messages open within each other. The schemas nest less: no message of them contains itself.
pub const NESTING_MAX: usize = 32;
/// Places that a list of messages or strings has for each of its elements: a `Vec` begins with four, has
/// room for up to twice its elements, and while it grows the old ones are there too.
const PLACES: u64 = 4;
/// The same of a list of numbers, which is long where it matters.
const GROWTH: u64 = 3;
/// A short list of numbers: its first allocation and that allocation's header.
const SHORT_LIST_BYTES: u64 = 48;
/// A map's first entry allocates a whole node of a `BTreeMap`: 11 places and its links.
const MAP_NODE: u64 = 12;
/// The header and the rounding of one allocation.
const ALLOCATION_BYTES: u64 = 16;
/// The least memory of a decoded message that takes a thread milliseconds to fill, beside bytes that are
/// shared with the message.
const LONG_DECODED_BYTES: u64 = 1 << 20;
/// The longest varint.
const VARINT_BYTES_MAX: u32 = 10;
/// The message whose lists are elements of tensors: their bytes count as contents, not as text.
const TENSOR_CONTENTS: &str = "inference.InferTensorContents";

/// The counts that one message may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WalkLimits {
    /// Fields at all depths; elements of a packed list count as one field.
    pub fields_max: u64,
    /// Messages directly within the message: tensors, parameters, requested outputs.
    pub elements_max: u64,
    /// Bytes outside byte fields and tensors' contents.
    pub text_bytes_max: u64,
}

impl WalkLimits {
    /// For messages of clients: no inference and no call of the admin API comes near.
    pub const CLIENT: Self = Self { fields_max: 65_536, elements_max: 4_096, text_bytes_max: 1 << 20 };
    /// For messages of controllers, workers, executors and programs. Long lists come in parts of about a
    /// mebibyte, of far fewer fields; to read as many as these takes a thread some milliseconds.
    pub const PEER: Self = Self { fields_max: 1 << 18, elements_max: 1 << 18, text_bytes_max: u64::MAX };
}

/// Why a message is not decoded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DecodeRefusal {
    /// Bytes that are no protobuf message.
    #[error("the message is not valid protobuf: {0}")]
    Malformed(&'static str),
    /// More than [`WalkLimits::fields_max`].
    #[error("the message has more than {max} fields: send its tensors in fewer, larger pieces")]
    TooManyFields {
        /// The most.
        max: u64,
    },
    /// More than [`WalkLimits::elements_max`].
    #[error("the message has more than {max} tensors and parameters: split it into several")]
    TooManyElements {
        /// The most.
        max: u64,
    },
    /// More than [`WalkLimits::text_bytes_max`].
    #[error("the message has more than {max} bytes outside its contents: shorten names and parameters")]
    TooMuchText {
        /// The most.
        max: u64,
    },
    /// More than [`DECODED_RATIO_MAX`] and [`DECODED_MARGIN_BYTES`] allow.
    #[error(
        "the message of {len} bytes would take {decoded} bytes of memory: send contents as raw bytes, in \
         fewer fields"
    )]
    TooLarge {
        /// Its length, or as much of it as arrived.
        len: u64,
        /// Its estimated size in memory.
        decoded: u64,
    },
}

impl DecodeRefusal {
    /// The failure that the message's sender is told. Not a `From`: a second source of failures would leave
    /// the type of many an error open.
    #[must_use]
    pub fn failure(&self) -> Failure {
        let message = self.to_string();
        match self {
            // No memory that is freed later helps.
            Self::TooLarge { .. } => {
                Failure { retryable: false, ..Failure::new(Reason::ByteBudgetExceeded, message) }
            }
            _ => Failure::malformed(message),
        }
    }
}

/// Why bytes do not become a message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The walk refused them.
    #[error(transparent)]
    Refused(#[from] DecodeRefusal),
    /// prost did.
    #[error("the message is not valid protobuf: {0}")]
    Prost(#[from] prost::DecodeError),
}

/// A message type of [`DESCRIPTORS`](crate::DESCRIPTORS).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MessageType(usize);

impl MessageType {
    /// The type of a gRPC method's requests, by the method's path. `None` for methods of other schemas.
    #[must_use]
    pub fn of_requests(path: &str) -> Option<Self> {
        SCHEMA.requests.get(path).copied()
    }

    /// A type by its full name, such as `inference.ModelInferRequest`.
    #[must_use]
    pub fn named(full_name: &str) -> Option<Self> {
        SCHEMA.types.get(full_name).copied()
    }

    fn shape(self) -> &'static Shape {
        &SCHEMA.shapes[self.0]
    }
}

static SCHEMA: LazyLock<Schema> = LazyLock::new(|| {
    let descriptors = FileDescriptorSet::decode(crate::DESCRIPTORS).expect("made by this crate's build");
    Schema::new(&descriptors)
});

struct Schema {
    types: HashMap<String, MessageType>,
    requests: HashMap<String, MessageType>,
    shapes: Vec<Shape>,
}

/// A message type as the walk needs it.
struct Shape {
    /// Its size in memory, without what its fields allocate.
    bytes: u64,
    /// By field number.
    fields: Vec<(u32, Field)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Field {
    /// A number: part of its message's own size.
    Number,
    /// Numbers of `bytes` each, packed or not.
    Numbers { bytes: u64, wire: NumberWire, is_contents: bool },
    /// A string; `each` is its place in a list, 0 outside of lists.
    Text { each: u64 },
    /// Bytes, which stay in the buffer that they arrived in.
    Bytes { each: u64 },
    /// A message; `each` is its place in a list or a map, 0 outside of them.
    Message { kind: MessageType, each: u64 },
    /// Passed over by prost.
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
            Shape { bytes: size_of(MessageType(at)), fields }
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

/// All messages under `message`, itself included, with their full names.
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

/// The size in memory of prost's struct for a message, rounded up: each field takes whole words.
fn size(
    at: usize,
    messages: &[(String, &DescriptorProto)],
    types: &HashMap<String, MessageType>,
    sizes: &mut [Option<u64>],
) -> u64 {
    if let Some(known) = sizes[at] {
        return known;
    }
    // A message within itself would be boxed: a test refuses schemas that have one.
    sizes[at] = Some(8);
    let mut total = 0;
    // Of a oneof's fields there is one at a time.
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
            // An optional number takes a word more.
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
) -> Field {
    let in_list = |bytes: u64| if is_list(field) { bytes * PLACES } else { 0 };
    let numbers = |bytes: u64, wire: NumberWire| match is_list(field) {
        true => Field::Numbers { bytes, wire, is_contents: parent == TENSOR_CONTENTS },
        false => Field::Number,
    };
    match (field.r#type(), kind) {
        (Type::String, _) => Field::Text { each: in_list(24) },
        (Type::Bytes, _) => Field::Bytes { each: in_list(32) },
        (Type::Message | Type::Group, Some(kind)) if is_map => {
            Field::Message { kind, each: place * MAP_NODE }
        }
        (Type::Message | Type::Group, Some(kind)) => Field::Message { kind, each: in_list(place) },
        (Type::Message | Type::Group, None) => Field::Unknown,
        (Type::Double, _) | (Type::Fixed64 | Type::Sfixed64, _) => numbers(8, NumberWire::Fixed { bytes: 8 }),
        (Type::Float | Type::Fixed32 | Type::Sfixed32, _) => numbers(4, NumberWire::Fixed { bytes: 4 }),
        (Type::Bool, _) => numbers(1, NumberWire::Varint),
        (Type::Int32 | Type::Uint32 | Type::Sint32 | Type::Enum, _) => numbers(4, NumberWire::Varint),
        (Type::Int64 | Type::Uint64 | Type::Sint64, _) => numbers(8, NumberWire::Varint),
    }
}

/// A pass over one message's bytes, in any pieces.
#[derive(Debug)]
pub struct MessageWalk {
    limits: WalkLimits,
    /// The message and those open within it, outermost first.
    open: Vec<OpenMessage>,
    position: Position,
    /// Bytes read.
    read: u64,
    fields: u64,
    elements: u64,
    text_bytes: u64,
    /// Memory for messages, strings and lists' places, room to grow included.
    structure_bytes: u64,
    /// Memory for the numbers of lists, without room to grow.
    number_bytes: u64,
}

#[derive(Debug, Clone, Copy)]
struct OpenMessage {
    kind: MessageType,
    /// Where it ends, counted from the beginning of the outermost; `u64::MAX`: not known yet.
    end: u64,
}

/// What the next byte belongs to.
#[derive(Debug, Clone, Copy)]
enum Position {
    Tag(Varint),
    /// The value of a number.
    Value(Varint),
    /// The length of a length-delimited field.
    Length(Field, Varint),
    /// A payload that is passed over.
    Payload {
        left: u64,
    },
    /// Packed varints, counted by their last bytes.
    Packed {
        left: u64,
        bytes: u64,
    },
}

/// A varint of which some bytes were read.
#[derive(Debug, Clone, Copy, Default)]
struct Varint {
    value: u64,
    bytes: u32,
}

impl Varint {
    /// Takes a byte; the value once the byte was the last.
    fn push(&mut self, byte: u8) -> Result<Option<u64>, DecodeRefusal> {
        // The tenth byte holds the last bit alone.
        if self.bytes == VARINT_BYTES_MAX - 1 && byte > 1 {
            return Err(DecodeRefusal::Malformed("a number of more than 64 bits"));
        }
        self.value |= u64::from(byte & 0x7f) << (7 * self.bytes);
        self.bytes += 1;
        Ok((byte & 0x80 == 0).then_some(self.value))
    }
}

impl MessageWalk {
    /// A walk over a message of this type. `len` is the message's length, where it is known beforehand.
    #[must_use]
    pub fn new(kind: MessageType, len: Option<u64>, limits: WalkLimits) -> Self {
        Self {
            limits,
            open: vec![OpenMessage { kind, end: len.unwrap_or(u64::MAX) }],
            position: Position::Tag(Varint::default()),
            read: 0,
            fields: 0,
            elements: 0,
            text_bytes: 0,
            structure_bytes: kind.shape().bytes,
            number_bytes: 0,
        }
    }

    /// The memory that the message's decoded form takes, as far as the message was read.
    #[must_use]
    pub fn decoded_bytes(&self) -> u64 {
        self.structure_bytes + self.number_bytes
    }

    /// Reads the next piece.
    ///
    /// # Errors
    /// [`DecodeRefusal`]: the message must not be decoded.
    pub fn push(&mut self, mut piece: &[u8]) -> Result<(), DecodeRefusal> {
        while !piece.is_empty() {
            let taken = match self.position {
                Position::Payload { left } => self.pass(left, piece),
                Position::Packed { left, bytes } => self.count(left, bytes, piece),
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

    /// Ends the walk: every message must have come to its end.
    ///
    /// # Errors
    /// [`DecodeRefusal::Malformed`].
    pub fn finish(self) -> Result<(), DecodeRefusal> {
        let between_fields = matches!(self.position, Position::Tag(Varint { bytes: 0, .. }));
        match self.open.as_slice() {
            [] => Ok(()),
            [outermost] if between_fields && [self.read, u64::MAX].contains(&outermost.end) => Ok(()),
            _ => Err(DecodeRefusal::Malformed("its last field is cut short")),
        }
    }

    /// Passes over payload; how many bytes of the piece that took.
    fn pass(&mut self, left: u64, piece: &[u8]) -> usize {
        let taken = (piece.len() as u64).min(left);
        self.read += taken;
        self.position = Position::Payload { left: left - taken };
        taken as usize
    }

    /// Counts packed varints; how many bytes of the piece that took.
    fn count(&mut self, left: u64, bytes: u64, piece: &[u8]) -> usize {
        let taken = (piece.len() as u64).min(left);
        let ends = piece[..taken as usize].iter().filter(|&&byte| byte < 0x80).count();
        self.number_bytes += ends as u64 * bytes;
        self.read += taken;
        self.position = Position::Packed { left: left - taken, bytes };
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
            Position::Tag(tag) => {
                if let Some(tag) = tag.push(byte)? {
                    self.begin_field(tag, innermost)?;
                }
            }
            Position::Value(value) => {
                if value.push(byte)?.is_some() {
                    self.position = Position::Tag(Varint::default());
                }
            }
            Position::Length(field, length) => {
                let field = *field;
                if let Some(length) = length.push(byte)? {
                    self.begin_payload(field, length, innermost)?;
                }
            }
            Position::Payload { .. } | Position::Packed { .. } => {}
        }
        Ok(())
    }

    fn begin_field(&mut self, tag: u64, innermost: OpenMessage) -> Result<(), DecodeRefusal> {
        let number = u32::try_from(tag >> 3).ok().filter(|&number| number > 0 && tag <= u64::from(u32::MAX));
        let number = number.ok_or(DecodeRefusal::Malformed("a field number that protobuf does not have"))?;
        self.fields += 1;
        let fields = &innermost.kind.shape().fields;
        let known = fields.binary_search_by_key(&number, |(number, _)| *number);
        let field = known.map_or(Field::Unknown, |at| fields[at].1);
        let wire_type = tag & 7;
        if let (Field::Numbers { bytes, .. }, 0 | 1 | 5) = (field, wire_type) {
            self.number_bytes += bytes;
            self.structure_bytes += SHORT_LIST_BYTES;
        }
        let fixed = |bytes: u64| match innermost.end - self.read < bytes {
            true => Err(DecodeRefusal::Malformed("a field is longer than the message that holds it")),
            false => Ok(Position::Payload { left: bytes }),
        };
        self.position = match wire_type {
            0 => Position::Value(Varint::default()),
            1 => fixed(8)?,
            2 => Position::Length(field, Varint::default()),
            5 => fixed(4)?,
            _ => return Err(DecodeRefusal::Malformed("a group or a wire type that protobuf does not have")),
        };
        if self.fields > self.limits.fields_max {
            return Err(DecodeRefusal::TooManyFields { max: self.limits.fields_max });
        }
        Ok(())
    }

    fn begin_payload(
        &mut self,
        field: Field,
        length: u64,
        innermost: OpenMessage,
    ) -> Result<(), DecodeRefusal> {
        if length > innermost.end - self.read {
            return Err(DecodeRefusal::Malformed("a field is longer than the message that holds it"));
        }
        self.position = Position::Payload { left: length };
        match field {
            Field::Message { kind, each } => {
                self.structure_bytes += each;
                self.elements += u64::from(self.open.len() == 1);
                if self.elements > self.limits.elements_max {
                    return Err(DecodeRefusal::TooManyElements { max: self.limits.elements_max });
                }
                if self.open.len() == NESTING_MAX {
                    return Err(DecodeRefusal::Malformed("messages nested too deep"));
                }
                // Only the outermost message's end may be unknown, and a length is at most what is left.
                self.open.push(OpenMessage { kind, end: self.read.saturating_add(length) });
                self.position = Position::Tag(Varint::default());
            }
            Field::Numbers { bytes, wire, is_contents } => {
                self.text_bytes += if is_contents { 0 } else { length };
                self.structure_bytes += SHORT_LIST_BYTES;
                match wire {
                    NumberWire::Varint => self.position = Position::Packed { left: length, bytes },
                    NumberWire::Fixed { bytes: width } => self.number_bytes += length / width * bytes,
                }
            }
            Field::Text { each } => {
                self.text_bytes += length;
                self.structure_bytes += each + length + ALLOCATION_BYTES;
            }
            Field::Bytes { each } => self.structure_bytes += each,
            // prost refuses a number with a length, and passes over what it does not know.
            Field::Number | Field::Unknown => self.text_bytes += length,
        }
        self.check()
    }

    /// Ends the payload and the messages that end here.
    fn close(&mut self) {
        if let Position::Payload { left: 0 } | Position::Packed { left: 0, .. } = self.position {
            self.position = Position::Tag(Varint::default());
        }
        if matches!(self.position, Position::Tag(Varint { bytes: 0, .. })) {
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

/// Walks over a message and decodes it. Byte fields share the buffer.
///
/// # Errors
/// [`DecodeError`].
pub fn decode<M: Message + Name + Default>(message: Bytes, limits: WalkLimits) -> Result<M, DecodeError> {
    let bytes = check::<M>(&message, limits)?;
    let decode = || M::decode(message);
    Ok(if bytes < LONG_DECODED_BYTES { decode()? } else { let_others_run(decode)? })
}

/// Walks over a whole message. Returns the memory that its decoded form takes.
fn check<M: Name>(message: &[u8], limits: WalkLimits) -> Result<u64, DecodeRefusal> {
    // Every generated type is in the descriptors: they come from one build.
    let kind = MessageType::named(&M::full_name()).ok_or(DecodeRefusal::Malformed("its type is unknown"))?;
    let mut walk = MessageWalk::new(kind, Some(message.len() as u64), limits);
    walk.push(message)?;
    let decoded = walk.decoded_bytes();
    walk.finish()?;
    Ok(decoded)
}

/// Does work that takes milliseconds while other threads do the rest of this one's: on a runtime of one
/// thread there are none.
fn let_others_run<T>(work: impl FnOnce() -> T) -> T {
    let flavor = Handle::try_current().map(|runtime| runtime.runtime_flavor());
    if flavor.is_ok_and(|flavor| flavor == RuntimeFlavor::MultiThread) {
        return block_in_place(work);
    }
    work()
}

/// tonic's prost codec, whose decoder walks over each message before it decodes the message.
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

/// The decoder of [`CheckedCodec`].
#[derive(Debug)]
pub struct CheckedDecoder<U>(PhantomData<U>);

impl<U: Message + Name + Default> Decoder for CheckedDecoder<U> {
    type Item = U;
    type Error = Status;

    fn decode(&mut self, message: &mut DecodeBuf<'_>) -> Result<Option<U>, Status> {
        // tonic holds a whole message in one piece; were it cut, the walk would not come to its end.
        let bytes =
            check::<U>(message.chunk(), WalkLimits::PEER).map_err(|refusal| to_status(&refusal.failure()))?;
        let decode = || U::decode(message);
        let decoded = if bytes < LONG_DECODED_BYTES { decode() } else { let_others_run(decode) };
        Ok(Some(decoded.map_err(|error| Status::internal(error.to_string()))?))
    }

    fn buffer_settings(&self) -> BufferSettings {
        BufferSettings::default()
    }
}

#[cfg(test)]
mod tests;
