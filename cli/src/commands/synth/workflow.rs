//! `synth workflow`: the networks of a workflow of `examples/workflows`, and inputs to try it on.

use std::path::Path;

use clap::ValueEnum;
use millrace_model::synth::{
    CELL_SIDE, CROP_SIDE, DarknetShape, Encoder, PHOTO_SIDE, PICTURE, ResNetShape, Seeded, TokenStates,
    camera, chunks, crops, denoiser, grey_line, painter, vote,
};

use super::{drawing, file};
use crate::failure::CommandFailure;

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// The workflow of examples/workflows.
    name: Example,
    /// Write narrow networks with the same inputs and outputs, less than 6 MiB each, for tests.
    #[arg(long)]
    small: bool,
}

/// The workflows of FaaSTube's table 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Example {
    /// Finds people and vehicles, and classifies each of them.
    TrafficMonitor,
    /// Paints the road, and blurs the rest.
    AutoDriving,
    /// Finds faces in three parts of a video in parallel, and recognises all of them.
    VideoEditing,
    /// Combines the votes of two classifiers on one picture.
    ImageEditing,
    /// Reads the text in a picture, if there is text.
    SocialMedia,
    /// Judges comments, and replies.
    Yelp,
}

/// The sizes of the networks.
struct Sizes {
    detector: DarknetShape,
    faces: DarknetShape,
    residual: ResNetShape,
    /// The factors by which crops and faces are enlarged for the residual network.
    enlarge: (usize, usize),
    alexnet: usize,
    comments: Encoder,
    replies: Encoder,
}

const FULL: Sizes = Sizes {
    detector: DarknetShape::SMALL,
    faces: DarknetShape::NANO,
    residual: ResNetShape::FIFTY,
    enlarge: (2, 4),
    alexnet: 64,
    comments: Encoder::BASE,
    replies: Encoder::DISTILLED,
};

const SMALL: Sizes = Sizes {
    detector: DarknetShape::TINY,
    faces: DarknetShape::TINY,
    residual: ResNetShape::TINY,
    enlarge: (1, 1),
    alexnet: 2,
    comments: Encoder::TINY,
    replies: Encoder::TINY,
};

/// The function that builds a network.
type Build = fn(Seeded, &Sizes) -> Vec<u8>;

/// The number of classes of a person or vehicle.
const CLASSES: usize = 16;
/// The size of the embedding that identifies a face.
const EMBEDDING: usize = 512;

impl Sizes {
    fn crops(&self) -> ResNetShape {
        ResNetShape { side: CROP_SIDE, enlarge: self.enlarge.0, classes: CLASSES, ..self.residual }
    }

    fn faces(&self) -> ResNetShape {
        ResNetShape { side: CELL_SIDE, enlarge: self.enlarge.1, classes: EMBEDDING, ..self.residual }
    }
}

impl Example {
    /// Returns the workflow's networks by the names of their files. The seed of a random network is
    /// the given seed plus the network's index in this list.
    fn networks(self) -> &'static [(&'static str, Build)] {
        match self {
            Self::TrafficMonitor => &[
                ("traffic-preprocess", |_, _| camera()),
                ("traffic-yolo-det", |seeded, sizes| seeded.yolo_det(sizes.detector)),
                ("traffic-postprocess", |_, _| crops()),
                ("traffic-people", |seeded, sizes| seeded.residual("people", sizes.crops())),
                ("traffic-vehicles", |seeded, sizes| seeded.residual("vehicles", sizes.crops())),
            ],
            Self::AutoDriving => &[
                ("driving-denoise", |_, _| denoiser(PICTURE, 1)),
                ("driving-yolo-seg", |seeded, sizes| seeded.yolo_seg(sizes.detector)),
                ("driving-blur", |_, _| painter()),
            ],
            Self::VideoEditing => &[
                ("video-preprocess", |_, _| chunks(drawing::FRAMES)),
                ("video-yolo-face", |seeded, sizes| seeded.yolo_face(sizes.faces)),
                ("video-recognise", |seeded, sizes| seeded.residual("faces", sizes.faces())),
            ],
            Self::ImageEditing => &[
                ("image-denoise", |_, _| denoiser((PHOTO_SIDE, PHOTO_SIDE), 4)),
                ("image-resnet", |seeded, sizes| seeded.residual("resnet50-like", sizes.residual)),
                ("image-alexnet", |seeded, sizes| seeded.alexnet_like(sizes.alexnet)),
                ("image-vote", |_, _| vote()),
            ],
            Self::SocialMedia => &[
                ("social-preprocess", |_, _| grey_line()),
                ("social-ocr", |seeded, sizes| seeded.ocr(sizes.detector)),
                ("social-bert", |seeded, sizes| seeded.bert_classifier(sizes.replies, TokenStates::Kept)),
            ],
            Self::Yelp => &[
                ("yelp-filter", |seeded, sizes| seeded.bert_classifier(sizes.comments, TokenStates::Given)),
                ("yelp-reply", |seeded, sizes| seeded.bert_reply(sizes.replies)),
            ],
        }
    }

    /// Returns the inputs to invoke the workflow on, by the names of their files.
    fn inputs(self) -> Result<Vec<(&'static str, Vec<u8>)>, CommandFailure> {
        Ok(match self {
            Self::TrafficMonitor => vec![
                ("street.png", drawing::street(8, 4)?),
                ("people.png", drawing::street(5, 0)?),
                ("empty.png", drawing::street(0, 0)?),
            ],
            Self::AutoDriving => vec![("road.png", drawing::street(6, 3)?)],
            Self::VideoEditing => vec![("video.pngs", drawing::video()?)],
            Self::ImageEditing => vec![("photo.png", drawing::photo()?)],
            Self::SocialMedia => vec![("post.png", drawing::post(24)?), ("view.png", drawing::post(0)?)],
            Self::Yelp => vec![("comments.bin", drawing::comments())],
        })
    }
}

impl Args {
    pub(super) fn write(&self, folder: &Path, seed: u64) -> Result<(), CommandFailure> {
        std::fs::create_dir_all(folder)
            .map_err(|error| CommandFailure::usage(format!("cannot create {}: {error}", folder.display())))?;
        let sizes = if self.small { &SMALL } else { &FULL };
        for (place, (name, build)) in (0..).zip(self.name.networks()) {
            let onnx = build(Seeded(seed.wrapping_add(place)), sizes);
            file::write(&folder.join(format!("{name}.onnx")), &onnx)?;
        }
        for (name, bytes) in self.name.inputs()? {
            file::write(&folder.join(name), &bytes)?;
        }
        Ok(())
    }
}
