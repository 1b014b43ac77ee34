"""The model, data and loss sections of image runs: classification and segmentation.

Imports neither torch nor torchvision.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from largetrain.config.schema import Auto, Count, CountOrNone, DataBase, Fraction, ModelBase, RunConfig, Section, Size

Probability = Annotated[float, Field(ge=0.0, le=1.0)]
Pixels = Annotated[int, Field(gt=0, le=65536)]
Triple = Annotated[list[float], Field(min_length=3, max_length=3)]
IMAGENET_MEAN, IMAGENET_STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


class VisionModelConfig(ModelBase):
    """What is trained: a model of torchvision by name, or your own class by `target`."""

    name: str = "resnet18"
    """Any classification or segmentation model of torchvision, such as `resnet50`, `vit_b_16`, `deeplabv3_resnet50`."""
    args: dict[str, Any] = {}
    """Further keyword arguments of torchvision's builder, or of `target`."""
    num_classes: Size | Auto = "auto"
    """Outputs; `auto`: the classes of the data."""
    pretrained: str | bool = False
    """Weights to start from: a file (.pth, .pt, .safetensors), true for torchvision's default or one of its names such
    as `IMAGENET1K_V1`; those must lie in torch's cache or be reachable. A head of another size is left as initialised.
    """
    pretrained_backbone: str | bool = False
    """The same for the backbone of a segmentation model: weights of the classification model."""
    freeze: list[str] = []
    """Parameter name prefixes that are not trained, such as `backbone.conv1`."""
    freeze_batch_norm: bool = False
    """Batch norms keep their statistics and weights: for fine-tuning with few images per rank."""
    batch_norm_momentum: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Share of each batch in the running statistics; absent: the model's own. MobileNets have 0.01, with which a run of
    a few hundred updates is evaluated with statistics that have hardly moved."""
    channels_last: bool = False
    """Keep images and weights in NHWC order: faster on tensor cores and on many CPUs (backend `ddp`)."""
    compile: bool = False
    """Run the model through torch.compile (backend `ddp`)."""
    activation_checkpointing: bool = False
    """Recompute the activations of each stage of the model in the backward pass instead of keeping them."""
    allow_unused_parameters: bool = False
    """Accept parameters that get no gradient in some update; otherwise backend `ddp` names them and ends the run."""


class AugmentConfig(Section):
    """How training images are varied. The draw depends on seed, epoch and sample alone."""

    crop: Literal["resized", "pad", "center"] = "resized"
    """`resized`: a random part of the image scaled to image_size; `pad`: the shorter side scaled to image_size, then
    padded by crop_padding and cropped at random to a square (CIFAR); `center`: as in evaluation."""
    crop_scale: Annotated[list[Probability], Field(min_length=2, max_length=2)] = [0.08, 1.0]
    """Smallest and largest share of the area that `resized` takes."""
    crop_ratio: Annotated[list[PositiveFloat], Field(min_length=2, max_length=2)] = [0.75, 4 / 3]
    """Smallest and largest width / height that `resized` takes."""
    crop_padding: CountOrNone = 4
    """Pixels that `pad` adds on each side."""
    flip: Probability = 0.5
    """Chance of a horizontal flip."""
    policy: Literal["none", "randaugment", "trivialaugment", "autoaugment", "augmix"] = "none"
    """Automatic augmentation of torchvision."""
    magnitude: Annotated[int, Field(ge=0, le=30)] = 9
    """Magnitude of `randaugment`; the other policies have none."""
    color_jitter: NonNegativeFloat = 0.0
    """Strength of brightness, contrast and saturation changes."""
    random_erasing: Probability = 0.0
    """Chance that a rectangle is erased."""
    mixup: Annotated[float, Field(ge=0.0, le=100.0)] = 0.0
    """Alpha of mixup; 0 is off."""
    cutmix: Annotated[float, Field(ge=0.0, le=100.0)] = 0.0
    """Alpha of cutmix; 0 is off. With mixup as well, each micro-batch draws one of the two."""
    repeats: Annotated[int, Field(ge=1, le=100)] = 1
    """Repeated augmentation (Hoffer et al. 2020): so many differently augmented copies of a sample in a row; an epoch
    has as many images as before."""


class ImageData(DataBase):
    """What the data of image tasks have in common."""

    validation: str | None = None
    """Separate validation folder; absent: the format's own validation split, or `validation_fraction` of `source`."""
    validation_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    """Share held out where there is no validation split: chosen by a digest of each file's name (of the pixels where
    there are no files), so the same always."""
    image_size: Pixels = 224
    """Side of the square images that the model sees in training."""
    mean: Triple = IMAGENET_MEAN
    """Mean of each colour channel in 0..1, subtracted."""
    std: Triple = IMAGENET_STD
    """Standard deviation of each colour channel in 0..1, divided by."""
    on_bad_image: Literal["error", "skip"] = "error"
    """An image that cannot be read: stop with its path; or warn, count, and let another sample take its place in
    training, while evaluation leaves it out."""
    max_bad_images: CountOrNone = 100
    """With `skip`: stop when more different images than this, of one split and on one rank, cannot be read."""
    samples: Count = 1024
    """Samples of `synthetic`, training scenes of `digit_scenes`. `validation_fraction` of that number is for
    validation: out of them in classification, made beside them in segmentation."""


class ClassificationData(ImageData):
    """Labelled images and how they are prepared."""

    source: str = "digits"
    """`digits` (scikit-learn's handwritten digits; extra `demo`), `synthetic` (random images for speed tests), or a
    folder."""
    format: Literal["auto", "folder", "cifar10", "cifar100", "mnist", "fashionmnist"] = "auto"
    """How the folder is laid out. `folder`: one folder per class, below `train/` and `val/` if these are there
    (ImageNet); the others as torchvision downloads them; `auto`: by what is there."""
    classes: Count | None = None
    """Number of classes of `synthetic`; absent: 1000."""
    eval_size: Pixels | None = None
    """Side of the square images in evaluation; absent: image_size."""
    eval_resize: Pixels | None = None
    """Shorter side to which images are scaled before the centre crop of evaluation; absent: eval_size x 256 / 224 for
    images of at least 128, else eval_size."""
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    """How images are scaled."""
    augment: AugmentConfig = AugmentConfig()


class ClassificationLoss(Section):
    """Cross-entropy per image."""

    label_smoothing: Fraction = 0.0
    """Share of the target that is spread over all classes."""


class ClassificationRun(RunConfig):
    """Image classification: cross-entropy, top-1, top-5."""

    task: Literal["classification"] = "classification"
    """`language_modeling`, `classification` or `segmentation`: decides which keys model and data have."""
    model: VisionModelConfig = VisionModelConfig()
    data: ClassificationData = ClassificationData()
    loss: ClassificationLoss = ClassificationLoss()


class SegmentationAugment(Section):
    """How training images and their masks are varied, together."""

    scale: Annotated[list[PositiveFloat], Field(min_length=2, max_length=2)] = [0.5, 2.0]
    """Smallest and largest factor of the random scaling, on `base_size`."""
    flip: Probability = 0.5
    """Chance of a horizontal flip."""
    color_jitter: NonNegativeFloat = 0.0
    """Strength of brightness, contrast and saturation changes, of the image alone."""


class SegmentationData(ImageData):
    """Images with a mask of class indices."""

    source: str = "digit_scenes"
    """`digit_scenes` (scenes composed from handwritten digits; extra `demo`), `synthetic`, or a folder."""
    format: Literal["auto", "voc", "cityscapes", "pairs"] = "auto"
    """`voc`: JPEGImages/, SegmentationClass/, ImageSets/Segmentation/; `cityscapes`: leftImg8bit/, gtFine/; `pairs`:
    images/ and masks/ with files of the same names, below train/ and val/ if these are there; `auto`: by what is
    there."""
    classes: list[str] | Count | None = None
    """Names, or the number, of the classes, index 0 first; absent: those of format or source; needed for `pairs`."""
    ignore_index: Annotated[int, Field(ge=-1, le=255)] = 255
    """Mask value without a class: left out of loss and metrics."""
    base_size: Pixels | None = None
    """Longer side to which images are scaled, before the random scaling in training; in evaluation they are then padded
    to a square, and metrics are taken at that size, masks scaled by nearest neighbour. Absent: image_size."""
    augment: SegmentationAugment = SegmentationAugment()


class SegmentationLoss(Section):
    """Cross-entropy per labelled pixel."""

    aux_weight: NonNegativeFloat = 0.5
    """Weight of the auxiliary head's loss; models of torchvision are built without that head for 0."""
    class_weights: list[NonNegativeFloat] | None = None
    """Weight of each class in training; the loss is divided by the sum of the weights of the labelled pixels."""


class SegmentationModelConfig(VisionModelConfig):
    """What is trained: a segmentation model of torchvision by name, or your own class by `target`."""

    name: str = "deeplabv3_resnet50"
    """Any segmentation model of torchvision: `fcn_resnet50`, `fcn_resnet101`, `deeplabv3_resnet50`,
    `deeplabv3_resnet101`, `deeplabv3_mobilenet_v3_large`, `lraspp_mobilenet_v3_large`."""


class SegmentationRun(RunConfig):
    """Semantic segmentation: cross-entropy, mean intersection over union, pixel accuracy."""

    task: Literal["segmentation"] = "segmentation"
    """`language_modeling`, `classification` or `segmentation`: decides which keys model and data have."""
    model: SegmentationModelConfig = SegmentationModelConfig()
    data: SegmentationData = SegmentationData()
    loss: SegmentationLoss = SegmentationLoss()
