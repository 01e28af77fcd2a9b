//! Executing a plan in plain memory, byte by byte.

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use weightd_checkpoint::{Checkpoint, NodePlan};
use weightd_core::content::Manifest;
use weightd_core::content::manifest::Tensor;

/// A tensor's shape and its bytes in row-major order.
pub type Bytes = (Vec<u64>, Vec<u8>);

/// What each rank holds after the plan was executed, by name; aliases too.
pub fn execute(checkpoint: &Checkpoint, plan: &NodePlan) -> Vec<BTreeMap<String, Bytes>> {
    let regions = regions(checkpoint, plan);
    let ranks = regions.iter().zip(plan.ranks());
    ranks.map(|(region, rank)| held(region, &rank.manifest)).collect()
}

/// Each rank's region after the plan was executed.
pub fn regions(checkpoint: &Checkpoint, plan: &NodePlan) -> Vec<Vec<u8>> {
    // Holes would show: what a plan leaves alone is not zero.
    let mut regions: Vec<Vec<u8>> = plan
        .read()
        .regions()
        .iter()
        .map(|&bytes| vec![0xa5; bytes as usize])
        .collect();
    for fill in plan.read().fills() {
        let (from, to) = (fill.offset as usize, (fill.offset + fill.bytes) as usize);
        regions[fill.rank as usize][from..to].fill(0);
    }
    for chunk in plan.read().chunks(1000, 0) {
        let mut read = vec![0; chunk.bytes as usize];
        let file = &checkpoint.files()[chunk.file as usize].file;
        file.read_exact_at(&mut read, chunk.offset).unwrap();
        for copy in plan.read().copies(&chunk) {
            for row in 0..copy.from.rows {
                let from = (copy.from.start + row * copy.from.pitch) as usize;
                let from = &read[from..from + copy.from.width as usize];
                let to = (copy.to + row * copy.to_pitch) as usize;
                let to = &mut regions[copy.rank as usize][to..to + copy.to_width() as usize];
                match copy.cast {
                    Some(cast) => cast.apply(from, to),
                    None => to.copy_from_slice(from),
                }
            }
        }
    }
    regions
}

fn held(region: &[u8], manifest: &Manifest) -> BTreeMap<String, Bytes> {
    let bytes = |tensor: &Tensor<'_>| (tensor.shape.to_vec(), row_major(region, tensor));
    let tensors = manifest
        .tensors()
        .map(|tensor| (tensor.name.to_owned(), bytes(&tensor)));
    let aliases = manifest
        .aliases()
        .map(|(alias, tensor)| (alias.to_owned(), bytes(&tensor)));
    tensors.chain(aliases).collect()
}

/// The elements of a view, one by one.
pub fn row_major(region: &[u8], tensor: &Tensor<'_>) -> Vec<u8> {
    let start = tensor.offset as usize;
    if tensor.is_contiguous() {
        return region[start..start + tensor.packed_bytes() as usize].to_vec();
    }
    let width = (tensor.dtype.bits() / 8) as usize;
    elements(tensor)
        .flat_map(|at| &region[at..at + width])
        .copied()
        .collect()
}

/// Where in the region the elements of a view start, one by one in row-major order.
pub fn elements(tensor: &Tensor<'_>) -> impl Iterator<Item = usize> {
    let (start, width) = (tensor.offset as usize, (tensor.dtype.bits() / 8) as usize);
    (0..tensor.elements()).map(move |element| {
        let (mut rest, mut at) = (element, 0);
        for (size, stride) in tensor.shape.iter().zip(tensor.strides).rev() {
            at += rest % size * stride;
            rest /= size;
        }
        start + at as usize * width
    })
}
