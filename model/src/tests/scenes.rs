//! The networks of the example workflows. Each network gives the same results as a whole, in
//! launches, and as the original file. The found objects are exactly the drawn objects.

use bytes::Bytes;
use rten::Value;
use rten_tensor::Tensor;
use rten_tensor::prelude::*;

use super::runner::{Values, load_compiled, load_original, run, run_in_launches};
use crate::compile;
use crate::synth::{
    CELL_SIDE, CELLS, CHUNK, COLUMN, CROP_SIDE, DarknetShape, Encoder, LINE, PICTURE, ResNetShape, Seeded,
    TokenStates, VIEW, camera, chunks, crops, denoiser, grey_line, painter, vote,
};

type Colour = [u8; 3];

const GREY: Colour = [100; 3];
const RED: Colour = [230, 20, 20];
const BLUE: Colour = [20, 20, 230];
const YELLOW: Colour = [230, 230, 20];

const SEEDED: Seeded = Seeded(7);

/// The outputs of a network by name.
struct Found(Values);

impl Found {
    fn value(&self, name: &str) -> Value {
        self.0.iter().find(|(given, _)| given == name).unwrap().1.clone()
    }

    fn floats(&self, name: &str) -> Tensor<f32> {
        let tensor: Tensor<f32> = self.value(name).try_into().unwrap();
        assert!(tensor.iter().all(|value| value.is_finite()), "{name} is not finite");
        tensor
    }

    fn numbers(&self, name: &str) -> Tensor<i32> {
        self.value(name).try_into().unwrap()
    }

    fn bytes(&self, name: &str) -> Tensor<u8> {
        self.value(name).try_into().unwrap()
    }
}

fn ask(onnx: Vec<u8>, input: &str, value: &Value) -> Found {
    ask_all(onnx, &[(input, value)])
}

fn ask_all(onnx: Vec<u8>, given: &[(&str, &Value)]) -> Found {
    let onnx = Bytes::from(onnx);
    let compiled = compile(&onnx).unwrap();
    let outputs: Vec<String> = compiled.summary.outputs.iter().map(|output| output.name.clone()).collect();
    let model = load_compiled(&compiled, &onnx);
    let original = run(&load_original(&onnx), given, &outputs);
    let shown = |values: &Values| format!("{values:?}");
    assert_eq!(shown(&run(&model, given, &outputs)), shown(&original));
    assert_eq!(shown(&run_in_launches(&model, &compiled, given)), shown(&original));
    Found(original)
}

/// Returns frames of `size` pixels in grey, in which the listed cells of `side` × `side` pixels have
/// other colours.
fn pixels(frames: usize, size: (usize, usize), side: usize, cells: &[(usize, Colour)]) -> Value {
    let (height, width) = size;
    let mut data = Vec::with_capacity(frames * height * width * 3);
    for at in 0..frames * height * width {
        let y = at / width;
        let x = at % width;
        let cell = y / side * (width / side) + x / side;
        let colour = cells.iter().find(|(place, _)| *place == cell).map_or(GREY, |(_, colour)| *colour);
        data.extend(colour.map(|channel| channel + (at % 7) as u8));
    }
    Tensor::from_data(&[frames, height, width, 3], data).into()
}

/// Runs a picture through the traffic monitor, up to the crops.
fn street(cells: &[(usize, Colour)]) -> Found {
    let camera = ask(camera(), "pixels", &pixels(1, PICTURE, CROP_SIDE, cells));
    let scores = ask(SEEDED.yolo_det(DarknetShape::TINY), "view", &camera.value("view"));
    let frame = camera.value("frame");
    let scores = scores.value("scores");
    ask_all(crops(), &[("frame", &frame), ("scores", &scores)])
}

#[test]
fn a_street_has_a_crop_for_each_drawn_object_and_none_if_empty() {
    let found = street(&[(0, RED), (239, RED), (20, BLUE)]);
    assert_eq!(found.floats("people").shape(), [2, 3, CROP_SIDE, CROP_SIDE]);
    assert_eq!(found.floats("vehicles").shape(), [1, 3, CROP_SIDE, CROP_SIDE]);
    assert_eq!(found.numbers("any_people").to_vec(), [1]);
    assert_eq!(found.numbers("any_vehicles").to_vec(), [1]);
    // The crop has the drawn colour, in the order of the planes.
    let red = f32::from(RED[0]) / 255.0;
    assert!((found.floats("people")[[0, 0, 5, 5]] - red).abs() < 0.03);
    let nobody = street(&[]);
    assert_eq!(nobody.floats("people").shape(), [0, 3, CROP_SIDE, CROP_SIDE]);
    assert_eq!(nobody.numbers("any_people").to_vec(), [0]);
    assert_eq!(nobody.numbers("any_vehicles").to_vec(), [0]);
}

#[test]
fn scores_depend_on_the_seed_but_found_cells_do_not() {
    let camera = ask(camera(), "pixels", &pixels(1, PICTURE, CROP_SIDE, &[(3, RED)]));
    let scores = |seed| ask(Seeded(seed).yolo_det(DarknetShape::TINY), "view", &camera.value("view"));
    let scores = [1, 2].map(|seed| scores(seed).floats("scores").to_vec());
    assert_ne!(scores[0], scores[1]);
    for scores in scores {
        assert_eq!(scores.len(), 2 * CELLS.0 * CELLS.1);
        let found: Vec<_> = (0..scores.len()).filter(|&at| scores[at] > 0.25).collect();
        assert_eq!(found, [3]);
    }
}

#[test]
fn the_road_is_painted_and_a_car_is_not() {
    let clean = ask(denoiser(PICTURE, 1), "pixels", &pixels(1, PICTURE, CROP_SIDE, &[(0, BLUE)]));
    let image = clean.value("image");
    let shares = ask(SEEDED.yolo_seg(DarknetShape::TINY), "image", &image);
    let shares = shares.value("shares");
    let painted = ask_all(painter(), &[("image", &image), ("shares", &shares)]).bytes("picture");
    let (height, width) = PICTURE;
    assert_eq!(painted.shape(), [1, height, width, 3]);
    let pixel = |y: usize, x: usize| [0, 1, 2].map(|channel| painted[[0, y, x, channel]]);
    let [red, green, blue] = pixel(height / 2, width / 2);
    assert!(green > red + 80 && red == blue, "a green road: {red} {green} {blue}");
    let [red, green, blue] = pixel(CROP_SIDE / 2, CROP_SIDE / 2);
    assert!(blue > 200 && red < 40 && green < 40, "a blue car: {red} {green} {blue}");
}

#[test]
fn faces_in_both_frames_of_a_chunk_are_found() {
    // Cell 5 is in the first frame; cell 240 + 7 is in the second.
    let frames = pixels(CHUNK, VIEW, CELL_SIDE, &[(5, YELLOW), (CELLS.0 * CELLS.1 + 7, YELLOW)]);
    let chunks = ask(chunks(CHUNK), "pixels", &frames).floats("chunks");
    assert_eq!(chunks.shape(), [1, CHUNK, 3, VIEW.0, VIEW.1]);
    let chunk: Value = chunks.into();
    let faces = ask(SEEDED.yolo_face(DarknetShape::TINY), "chunk", &chunk);
    assert_eq!(faces.floats("faces").shape(), [2, 3, CELL_SIDE, CELL_SIDE]);
    let known = ResNetShape { side: CELL_SIDE, enlarge: 2, classes: 8, ..ResNetShape::TINY };
    let known = ask(SEEDED.residual("faces", known), "x", &faces.value("faces"));
    assert_eq!(known.floats("y").shape(), [2, 8]);
}

#[test]
fn two_classifiers_agree_on_a_mean() {
    let photo = ask(denoiser((896, 896), 4), "pixels", &pixels(1, (896, 896), 64, &[(9, RED)]));
    let image = photo.value("image");
    let first = ask(SEEDED.residual("small", ResNetShape::TINY), "x", &image).value("y");
    let second = ask(SEEDED.alexnet_like(2), "x", &image).value("y");
    let vote = ask_all(vote(), &[("a", &first), ("b", &second)]);
    let shares = vote.floats("probabilities").to_vec();
    assert!((shares.iter().sum::<f32>() - 1.0).abs() < 1e-4);
    let label = usize::try_from(vote.numbers("label").to_vec()[0]).unwrap();
    assert!(shares.iter().all(|&share| share <= shares[label]));
}

#[test]
fn a_line_has_a_token_for_each_stroke() {
    let height = 2 * LINE.0;
    let width = 2 * LINE.1;
    let read = |strokes: &[usize]| {
        let mut data = vec![230_u8; height * width * 3];
        for y in height / 4..height / 2 {
            for stroke in strokes {
                let left = (y * width + stroke * 2 * COLUMN + 8) * 3;
                data[left..left + 3 * COLUMN].fill(10);
            }
        }
        let pixels: Value = Tensor::from_data(&[1, height, width, 3], data).into();
        let line = ask(grey_line(), "pixels", &pixels);
        ask(SEEDED.ocr(DarknetShape::TINY), "line", &line.value("line"))
    };
    let three = read(&[0, 7, 39]);
    assert_eq!(three.numbers("tokens").shape(), [1, 3]);
    assert!(three.numbers("tokens").iter().all(|&token| (0..96).contains(&token)));
    assert_eq!(three.numbers("any_text").to_vec(), [1]);
    let none = read(&[]);
    assert_eq!(none.numbers("tokens").shape(), [1, 0]);
    assert_eq!(none.numbers("any_text").to_vec(), [0]);
}

#[test]
fn comments_are_classified_and_answered_token_by_token() {
    let ids: Vec<i32> = (0..24).map(|at| at * 7919 % 3000).collect();
    let ids: Value = Tensor::from_data(&[2, 12], ids).into();
    let judged = ask(SEEDED.bert_classifier(Encoder::TINY, TokenStates::Given), "input_ids", &ids);
    for share in judged.floats("scores").to_vec().chunks(2) {
        assert!((share.iter().sum::<f32>() - 1.0).abs() < 1e-5);
    }
    let states = judged.value("states");
    let reply = ask(SEEDED.bert_reply(Encoder::TINY), "states", &states).numbers("reply");
    assert_eq!(reply.shape(), [2, 12]);
    assert!(reply.iter().all(|token| (0..3000).contains(token)));
    let alone = ask(SEEDED.bert_classifier(Encoder::TINY, TokenStates::Kept), "input_ids", &ids);
    assert_eq!(alone.0.len(), 1);
    assert_eq!(alone.floats("scores").to_vec(), judged.floats("scores").to_vec());
}

#[test]
fn full_networks_have_the_documented_number_of_parameters() {
    let parameters = |onnx: Vec<u8>| compile(&Bytes::from(onnx)).unwrap().summary.parameters;
    let cases = [
        ("yolo-det", SEEDED.yolo_det(DarknetShape::SMALL), 6_600_000..7_400_000),
        ("yolo-seg", SEEDED.yolo_seg(DarknetShape::SMALL), 6_600_000..7_400_000),
        ("yolo-face", SEEDED.yolo_face(DarknetShape::NANO), 1_600_000..1_900_000),
        ("ocr", SEEDED.ocr(DarknetShape::SMALL), 3_000_000..3_600_000),
        ("alexnet", SEEDED.alexnet_like(64), 60_000_000..62_500_000),
    ];
    for (name, onnx, expected) in cases {
        let found = parameters(onnx);
        assert!(expected.contains(&found), "{name}: {found}");
    }
}
