"""A folder of photographs of few pixels, which are decoded in no time."""

from PIL import Image

from bench import pictures


def make(folder, *, classes, images):
    pictures.make(folder, classes=classes, images=images)
    for file in folder.glob("*/*/*.jpg"):
        with Image.open(file) as image:
            image.reduce(4).save(file, quality=90)
    return folder
