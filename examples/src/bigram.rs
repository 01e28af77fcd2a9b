//! The smallest language model that a checkpoint holds: the next token is what the head makes of the
//! embedding of the last one. It needs two matrices and computes on the host.

use safetensors::SafeTensors;
use std::collections::HashMap;
use std::fs;
use std::io;
use thiserror::Error;
use weightd_checkpoint::Checkpoint;
use weightd_core::content::Dtype;
use weightd_gpu::Weights;

const EMBEDDING: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";

/// The model.
#[derive(Debug)]
pub struct Bigram {
    tensors: Tensors,
    vocabulary: usize,
    width: usize,
}

/// Where the tensors are. The engine computes on them the same way.
#[derive(Debug)]
enum Tensors {
    /// The cache's memory, or a copy of it. Nothing is converted and nothing moves.
    Weights(Box<Weights>),
    /// Read from files by the engine itself.
    Read(HashMap<String, (Dtype, Vec<u64>, Vec<u8>)>),
}

/// Why there is no model.
#[derive(Debug, Error)]
#[allow(missing_docs)]
pub enum ModelError {
    #[error("{name}: this model needs a matrix of bf16, or of 8-bit integers with a scale for each row")]
    Form { name: String },
    #[error(
        "the weights are on a GPU, and this example computes on the host: use --device cpu on both sides"
    )]
    Device,
    #[error(transparent)]
    Missing(#[from] weightd_gpu::Missing),
    #[error(transparent)]
    Memory(#[from] weightd_gpu::MemoryError),
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Format(#[from] safetensors::SafeTensorError),
}

impl Bigram {
    /// Over weights from the cache, which it keeps: it computes on that very memory.
    pub fn over(weights: Weights) -> Result<Bigram, ModelError> {
        // A model must not run on what is not there.
        weights.require([EMBEDDING, HEAD])?;
        if weights.tensors().any(|tensor| tensor.host().is_none()) {
            return Err(ModelError::Device);
        }
        Bigram::new(Tensors::Weights(Box::new(weights)))
    }

    /// Read from the checkpoint's files, without a daemon. Other files may lie beside them.
    pub fn read(checkpoint: &Checkpoint) -> Result<Bigram, ModelError> {
        let mut tensors = HashMap::new();
        for file in checkpoint.files() {
            let bytes = fs::read(&file.path)?;
            for (name, view) in SafeTensors::deserialize(&bytes)?.tensors() {
                let shape = view.shape().iter().map(|size| *size as u64).collect();
                if view.dtype() == safetensors::Dtype::BF16 {
                    tensors.insert(name, (Dtype::BF16, shape, view.data().to_vec()));
                }
            }
        }
        Bigram::new(Tensors::Read(tensors))
    }

    fn new(tensors: Tensors) -> Result<Bigram, ModelError> {
        let [vocabulary, width] = tensors.matrix(EMBEDDING)?;
        if tensors.matrix(HEAD)? != [vocabulary, width] {
            return Err(ModelError::Form {
                name: HEAD.to_owned(),
            });
        }
        Ok(Bigram {
            tensors,
            vocabulary,
            width,
        })
    }

    /// How many tokens it knows.
    pub fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    /// The tokens that follow `first`, which is taken modulo the vocabulary.
    pub fn generate(&self, first: usize, count: usize) -> Vec<usize> {
        let next = |token: &usize| Some(self.next(*token));
        let first = first % self.vocabulary;
        std::iter::successors(Some(first), next)
            .skip(1)
            .take(count)
            .collect()
    }

    fn next(&self, token: usize) -> usize {
        let hidden = self.row(EMBEDDING, token);
        let score = |candidate: usize| -> f32 {
            let weights = self.row(HEAD, candidate);
            hidden.iter().zip(weights).map(|(a, b)| a * b).sum()
        };
        let scores = (0..self.vocabulary).map(|candidate| (score(candidate), candidate));
        // A token is no use after itself.
        let others = scores.filter(|(_, candidate)| *candidate != token);
        let best = others.max_by(|(a, _), (b, _)| a.total_cmp(b));
        best.map_or(0, |(_, candidate)| candidate)
    }

    fn row(&self, name: &str, index: usize) -> Vec<f32> {
        let (dtype, _, bytes) = self
            .tensors
            .get(name)
            .expect("it was there when the model was built");
        let row = &bytes[index * self.width * dtype.bits() as usize / 8..];
        match dtype {
            Dtype::BF16 => row.chunks_exact(2).take(self.width).map(bf16).collect(),
            _ => {
                let scale = self.scale(name, index);
                let cells = row.iter().take(self.width);
                cells.map(|cell| f32::from(*cell as i8) * scale).collect()
            }
        }
    }

    fn scale(&self, name: &str, row: usize) -> f32 {
        let (_, _, bytes) = self
            .tensors
            .get(&scale_of(name))
            .expect("it was there when the model was built");
        let bytes = &bytes[row * 4..][..4];
        f32::from_le_bytes(bytes.try_into().expect("four bytes"))
    }
}

impl Tensors {
    /// Element type, shape, and the elements in row-major order.
    fn get(&self, name: &str) -> Option<(Dtype, &[u64], &[u8])> {
        match self {
            Tensors::Weights(weights) => {
                let tensor = weights.get(name)?;
                Some((tensor.dtype, tensor.shape, tensor.contiguous()?))
            }
            Tensors::Read(tensors) => {
                let (dtype, shape, bytes) = tensors.get(name)?;
                Some((*dtype, shape, bytes))
            }
        }
    }

    /// The shape of a matrix that this model can compute with.
    fn matrix(&self, name: &str) -> Result<[usize; 2], ModelError> {
        let form = || ModelError::Form {
            name: name.to_owned(),
        };
        let (dtype, shape, _) = self.get(name).ok_or_else(form)?;
        let &[rows, width] = shape else {
            return Err(form());
        };
        let scaled = || {
            let scale = self.get(&scale_of(name));
            scale.is_some_and(|(dtype, shape, _)| dtype == Dtype::F32 && shape == [rows])
        };
        match dtype {
            Dtype::BF16 => {}
            Dtype::I8 if scaled() => {}
            _ => return Err(form()),
        }
        Ok([rows as usize, width as usize])
    }
}

/// The name of the scales of a quantized matrix.
fn scale_of(name: &str) -> String {
    format!("{name}_scale")
}

/// A tensor that an engine made itself.
#[derive(Clone, Debug)]
pub struct Quantized {
    /// Its name.
    pub name: String,
    /// The type of its elements.
    pub dtype: Dtype,
    /// The size of each dimension, outermost first.
    pub shape: Vec<u64>,
    /// The elements in row-major order.
    pub bytes: Vec<u8>,
}

/// The matrices of a model as 8-bit integers, with a scale for each row. This is what an engine may do to its
/// weights after loading, and no daemon needs to know of.
pub fn quantize(model: &Bigram) -> Vec<Quantized> {
    let mut tensors = Vec::new();
    for name in [EMBEDDING, HEAD] {
        let (mut cells, mut scales) = (Vec::new(), Vec::new());
        for index in 0..model.vocabulary {
            let row = model.row(name, index);
            let largest = row.iter().fold(0f32, |largest, cell| largest.max(cell.abs()));
            let scale = if largest > 0.0 { largest / 127.0 } else { 1.0 };
            cells.extend(row.iter().map(|cell| (cell / scale).round() as i8 as u8));
            scales.extend(scale.to_le_bytes());
        }
        let (rows, width) = (model.vocabulary as u64, model.width as u64);
        tensors.push(Quantized {
            name: name.to_owned(),
            dtype: Dtype::I8,
            shape: vec![rows, width],
            bytes: cells,
        });
        tensors.push(Quantized {
            name: scale_of(name),
            dtype: Dtype::F32,
            shape: vec![rows],
            bytes: scales,
        });
    }
    tensors
}

fn bf16(bytes: &[u8]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes([bytes[0], bytes[1]])) << 16)
}
